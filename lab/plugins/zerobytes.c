// SPDX-License-Identifier: GPL-2.0
/*
 * zerobytes: a QEMU TCG plugin that counts the bytes a guest's kernel stores with `rep stos`.
 *
 * On a CPU without ERMS every kernel clears pages that way, so the count is the same for base and
 * ours, without help from either. (The kernel fills other memory that way too; compare what a job
 * adds.) The count stands in a file of one 64-bit word, a few milliseconds late.
 *
 * Arguments: out=FILE
 */
#include <pthread.h>

#include "plugin.h"

static qemu_plugin_u64 bytes;
static volatile uint64_t *shown;

/* Bytes one repetition of this instruction stores, or 0 if it is no `rep stos`. */
static unsigned int rep_stos(const struct qemu_plugin_insn *insn)
{
	unsigned char code[15];
	size_t len = qemu_plugin_insn_data(insn, code, sizeof(code)), i;
	unsigned int size = 4;
	bool rep = false;

	for (i = 0; i < len; i++) {
		if (code[i] == 0xf3)
			rep = true;
		else if (code[i] == 0x66)
			size = 2;
		else if ((code[i] & 0xf0) == 0x40)
			size = code[i] & 8 ? 8 : size;
		else
			break;
	}
	if (!rep || i + 1 != len)
		return 0;
	if (code[i] == 0xaa)
		return 1;
	return code[i] == 0xab ? size : 0;
}

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *tb)
{
	size_t n = qemu_plugin_tb_n_insns(tb), i;

	for (i = 0; i < n; i++) {
		struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);
		unsigned int size = rep_stos(insn);

		if (size && plugin_is_kernel(qemu_plugin_insn_vaddr(insn)))
			qemu_plugin_register_vcpu_mem_inline_per_vcpu(
				insn, QEMU_PLUGIN_MEM_W, QEMU_PLUGIN_INLINE_ADD_U64, bytes, size);
	}
}

static void *show(void *unused)
{
	for (;;) {
		shown[0] = qemu_plugin_u64_sum(bytes);
		usleep(5000);
	}
	return NULL;
}

QEMU_PLUGIN_EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc,
					   char **argv)
{
	const char *path = plugin_argument(argc == 1 ? argv[0] : NULL, "out");
	pthread_t thread;

	shown = path ? plugin_share(path, sizeof(*shown)) : NULL;
	if (!shown)
		return -1;
	bytes = qemu_plugin_scoreboard_u64(qemu_plugin_scoreboard_new(sizeof(uint64_t)));
	qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
	return pthread_create(&thread, NULL, show, NULL) ? -1 : 0;
}
