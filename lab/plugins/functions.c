// SPDX-License-Identifier: GPL-2.0
/*
 * functions: a QEMU TCG plugin that counts the instructions a guest's kernel executes, by the
 * address at which each translated block begins.
 *
 * At exit it writes a line for each block: hexadecimal address, decimal instructions. The lab adds
 * them up by function, since few blocks reach into the next one.
 *
 * Arguments: out=FILE
 */
#include <inttypes.h>

#include <glib.h>

#include "plugin.h"

struct block {
	uint64_t address;
	qemu_plugin_u64 count;
};

static GAsyncQueue *blocks;	/* CPUs translate at the same time */
static FILE *out;

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *tb)
{
	struct block *one;

	if (!plugin_is_kernel(qemu_plugin_tb_vaddr(tb)))
		return;
	one = g_new(struct block, 1);
	one->address = qemu_plugin_tb_vaddr(tb);
	one->count = qemu_plugin_scoreboard_u64(qemu_plugin_scoreboard_new(sizeof(uint64_t)));
	qemu_plugin_register_vcpu_tb_exec_inline_per_vcpu(tb, QEMU_PLUGIN_INLINE_ADD_U64, one->count,
							  qemu_plugin_tb_n_insns(tb));
	g_async_queue_push(blocks, one);
}

static void finished(qemu_plugin_id_t id, void *unused)
{
	struct block *one;

	while ((one = g_async_queue_try_pop(blocks)))
		fprintf(out, "%" PRIx64 " %" PRIu64 "\n", one->address, qemu_plugin_u64_sum(one->count));
	fclose(out);
}

QEMU_PLUGIN_EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc,
					   char **argv)
{
	const char *path = plugin_argument(argc == 1 ? argv[0] : NULL, "out");

	out = path ? fopen(path, "w") : NULL;
	if (path && !out)
		perror(path);
	blocks = g_async_queue_new();
	qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
	qemu_plugin_register_atexit_cb(id, finished, NULL);
	return out ? 0 : -1;
}
