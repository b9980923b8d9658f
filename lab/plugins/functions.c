// SPDX-License-Identifier: GPL-2.0
/*
 * functions: a QEMU TCG plugin that counts the instructions a guest's kernel executes, by the
 * address at which each translated block begins.
 *
 * At exit it writes a line for each address: hexadecimal address, decimal instructions. The lab adds
 * them up by function, since few blocks reach into the next one.
 *
 * Arguments: out=FILE
 */
#include <inttypes.h>
#include <pthread.h>

#include "plugin.h"

#define BITS 18
#define SLOTS (1u << BITS)	/* many more than the blocks that a kernel executes */

static struct qemu_plugin_scoreboard *board;
static uint64_t addresses[SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static FILE *out;
static bool full;

/* The slot of an address, or SLOTS if there is none left. */
static unsigned int slot_of(uint64_t address)
{
	unsigned int slot = (unsigned int)((address * 0x9e3779b97f4a7c15ull) >> (64 - BITS)), tries;

	for (tries = 0; tries < SLOTS; tries++, slot = (slot + 1) % SLOTS) {
		if (!addresses[slot])
			addresses[slot] = address;
		if (addresses[slot] == address)
			return slot;
	}
	full = true;
	return SLOTS;
}

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *tb)
{
	qemu_plugin_u64 count = { board, 0 };
	unsigned int slot;

	(void)id;
	if (!plugin_is_kernel(qemu_plugin_tb_vaddr(tb)))
		return;
	pthread_mutex_lock(&lock);
	slot = slot_of(qemu_plugin_tb_vaddr(tb));
	pthread_mutex_unlock(&lock);
	count.offset = slot * sizeof(uint64_t);
	if (slot < SLOTS)
		qemu_plugin_register_vcpu_tb_exec_inline_per_vcpu(tb, QEMU_PLUGIN_INLINE_ADD_U64, count,
								  qemu_plugin_tb_n_insns(tb));
}

static void finished(qemu_plugin_id_t id, void *unused)
{
	unsigned int slot;

	(void)id;
	(void)unused;
	if (full)
		fprintf(stderr, "functions: %u blocks were too few, some are not counted\n", SLOTS);
	for (slot = 0; slot < SLOTS; slot++) {
		const qemu_plugin_u64 count = { board, slot * sizeof(uint64_t) };

		if (addresses[slot])
			fprintf(out, "%" PRIx64 " %" PRIu64 "\n", addresses[slot], qemu_plugin_u64_sum(count));
	}
	fclose(out);
}

QEMU_PLUGIN_EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc,
					   char **argv)
{
	const char *path = plugin_argument(argc == 1 ? argv[0] : NULL, "out");

	(void)info;
	out = path ? fopen(path, "w") : NULL;
	if (path && !out)
		perror(path);
	board = qemu_plugin_scoreboard_new(SLOTS * sizeof(uint64_t));
	qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
	qemu_plugin_register_atexit_cb(id, finished, NULL);
	return out && board ? 0 : -1;
}
