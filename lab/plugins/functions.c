// SPDX-License-Identifier: GPL-2.0
/*
 * functions: a QEMU TCG plugin that counts the instructions a guest's kernel executes, by the
 * address at which each translated block begins.
 *
 * At exit it writes a line for each address: hexadecimal address, decimal instructions. Who has the
 * kernel's symbols can add them up by function, since a block hardly ever reaches into the next one.
 *
 * Arguments: out=FILE
 */
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <qemu-plugin.h>

QEMU_PLUGIN_EXPORT int qemu_plugin_version = QEMU_PLUGIN_VERSION;

/* Far more than there are blocks in a kernel that are ever executed; a power of two. */
#define SLOTS (1u << 18)

static struct qemu_plugin_scoreboard *board;
static uint64_t addresses[SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *path;
static bool full;

/* The slot of an address, or SLOTS if there is none left. */
static unsigned int slot_of(uint64_t address)
{
	unsigned int slot = (unsigned int)((address * 0x9e3779b97f4a7c15ull) >> 46), tries;

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
	const uint64_t address = qemu_plugin_tb_vaddr(tb);
	unsigned int slot;

	(void)id;
	/* Kernel addresses are the upper half. */
	if (!(address >> 63))
		return;
	pthread_mutex_lock(&lock);
	slot = slot_of(address);
	pthread_mutex_unlock(&lock);
	if (slot < SLOTS) {
		qemu_plugin_u64 count = { board, slot * sizeof(uint64_t) };

		qemu_plugin_register_vcpu_tb_exec_inline_per_vcpu(
			tb, QEMU_PLUGIN_INLINE_ADD_U64, count, qemu_plugin_tb_n_insns(tb));
	}
}

static void finished(qemu_plugin_id_t id, void *unused)
{
	FILE *out = fopen(path, "w");
	unsigned int slot;

	(void)id;
	(void)unused;
	if (!out) {
		perror("functions: out=");
		return;
	}
	if (full)
		fprintf(stderr, "functions: more blocks than there is room for, some are not counted\n");
	for (slot = 0; slot < SLOTS; slot++) {
		const qemu_plugin_u64 count = { board, slot * sizeof(uint64_t) };

		if (addresses[slot])
			fprintf(out, "%" PRIx64 " %" PRIu64 "\n", addresses[slot],
				qemu_plugin_u64_sum(count));
	}
	fclose(out);
}

QEMU_PLUGIN_EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc,
					   char **argv)
{
	(void)info;
	if (argc != 1 || strncmp(argv[0], "out=", 4)) {
		fprintf(stderr, "functions: give out=FILE and nothing else\n");
		return -1;
	}
	path = strdup(argv[0] + 4);
	board = qemu_plugin_scoreboard_new(SLOTS * sizeof(uint64_t));
	qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
	qemu_plugin_register_atexit_cb(id, finished, NULL);
	return path && board ? 0 : -1;
}
