// SPDX-License-Identifier: GPL-2.0
/*
 * zerobytes: a QEMU TCG plugin that counts the bytes a guest's kernel stores with `rep stos`.
 *
 * On a CPU without ERMS that is how the kernel clears pages, whatever the kernel, so the count
 * serves base and ours alike and needs no help from either. (It fills other memory that way too;
 * compare what a job adds.) The count stands in an 8-byte file, a little behind.
 *
 * Arguments: out=FILE
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <qemu-plugin.h>

QEMU_PLUGIN_EXPORT int qemu_plugin_version = QEMU_PLUGIN_VERSION;

static struct qemu_plugin_scoreboard *board;
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

	(void)id;
	for (i = 0; i < n; i++) {
		struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);
		unsigned int size = rep_stos(insn);

		/* Kernel addresses are the upper half. */
		if (size && qemu_plugin_insn_vaddr(insn) >> 63)
			qemu_plugin_register_vcpu_mem_inline_per_vcpu(
				insn, QEMU_PLUGIN_MEM_W, QEMU_PLUGIN_INLINE_ADD_U64, bytes, size);
	}
}

static void *show(void *unused)
{
	(void)unused;
	for (;;) {
		*shown = qemu_plugin_u64_sum(bytes);
		usleep(5000);
	}
	return NULL;
}

QEMU_PLUGIN_EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc,
					   char **argv)
{
	pthread_t thread;
	int fd;

	(void)info;
	if (argc != 1 || strncmp(argv[0], "out=", 4)) {
		fprintf(stderr, "zerobytes: give out=FILE and nothing else\n");
		return -1;
	}
	fd = open(argv[0] + 4, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	if (fd < 0 || ftruncate(fd, sizeof(*shown))) {
		perror("zerobytes: out=");
		return -1;
	}
	shown = mmap(NULL, sizeof(*shown), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (shown == MAP_FAILED) {
		perror("zerobytes: mmap");
		return -1;
	}
	board = qemu_plugin_scoreboard_new(sizeof(uint64_t));
	bytes = qemu_plugin_scoreboard_u64(board);
	qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
	return pthread_create(&thread, NULL, show, NULL) ? -1 : 0;
}
