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

#include <glib.h>

#include "plugin.h"

static GHashTable *counters;	/* qemu_plugin_u64 by address */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static FILE *out;

static qemu_plugin_u64 *counter_of(uint64_t address)
{
	const gpointer key = (gpointer)(uintptr_t)address;
	qemu_plugin_u64 *found;

	pthread_mutex_lock(&lock);
	found = g_hash_table_lookup(counters, key);
	if (!found) {
		found = g_new(qemu_plugin_u64, 1);
		*found = qemu_plugin_scoreboard_u64(qemu_plugin_scoreboard_new(sizeof(uint64_t)));
		g_hash_table_insert(counters, key, found);
	}
	pthread_mutex_unlock(&lock);
	return found;
}

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *tb)
{
	const uint64_t address = qemu_plugin_tb_vaddr(tb);

	(void)id;
	if (plugin_is_kernel(address))
		qemu_plugin_register_vcpu_tb_exec_inline_per_vcpu(tb, QEMU_PLUGIN_INLINE_ADD_U64,
								  *counter_of(address),
								  qemu_plugin_tb_n_insns(tb));
}

static void finished(qemu_plugin_id_t id, void *unused)
{
	gpointer address, counter;
	GHashTableIter all;

	(void)id;
	(void)unused;
	g_hash_table_iter_init(&all, counters);
	while (g_hash_table_iter_next(&all, &address, &counter))
		fprintf(out, "%" PRIx64 " %" PRIu64 "\n", (uint64_t)(uintptr_t)address,
			qemu_plugin_u64_sum(*(qemu_plugin_u64 *)counter));
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
	counters = g_hash_table_new(NULL, NULL);
	qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
	qemu_plugin_register_atexit_cb(id, finished, NULL);
	return out ? 0 : -1;
}
