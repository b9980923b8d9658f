// SPDX-License-Identifier: GPL-2.0
/*
 * interleave: allocates large folios under the interleave policy, each by a fault at some other place
 * in it, in a mapping that does not begin where a folio would. Neighbours have to be on different nodes.
 */
#include "common.h"

#include <getopt.h>
#include <linux/mempolicy.h>
#include <sys/syscall.h>

#define PAGE 4096UL
#define COUNT 64UL

static void usage(FILE *out)
{
	fprintf(out,
"usage: interleave [options]\n"
"Interleaves large folios over nodes 0 and 1; prints one JSON line with what came of it.\n"
"The sysfs switches of the size must be on.\n"
"Options:\n"
"  --size KB    size of the folios, a power of two (default 64)\n"
"  --help       this text\n"
"Exit: 0 done, 1 neighbours are on one node, 2 bad usage, 3 the machine cannot do it.\n");
}

/* The node of the page that is mapped at an address. */
static int node_of(void *page)
{
	int node = -1;

	if (syscall(SYS_get_mempolicy, &node, NULL, 0UL, page, MPOL_F_NODE | MPOL_F_ADDR))
		kz_die(KZ_BROKEN, "get_mempolicy: %s", strerror(errno));
	return node;
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{ "size", required_argument, NULL, 's' },
		{ "help", no_argument, NULL, 'h' },
		{ NULL, 0, NULL, 0 },
	};
	unsigned long size = 64 * 1024, nodes = 3, i, same = 0, alone = 0;
	uintptr_t first;
	unsigned char *mem;
	int opt, last = -1;

	kz_program = "interleave";
	while ((opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (opt) {
		case 's':
			size = kz_number("--size", optarg, 8, 1024) * 1024;
			break;
		case 'h':
			usage(stdout);
			return KZ_OK;
		default:
			usage(stderr);
			return KZ_USAGE;
		}
	}
	if (optind < argc || (size & (size - 1)))
		kz_die(KZ_USAGE, "the size is one number, a power of two; see --help");

	mem = mmap(NULL, (COUNT + 3) * size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (mem == MAP_FAILED)
		kz_die(KZ_BROKEN, "mmap: %s", strerror(errno));
	first = ((uintptr_t)mem + 2 * size - 1) & ~(size - 1);
	/* From an odd page before the first folio on. */
	mem = mmap((void *)(first - PAGE), COUNT * size + PAGE, PROT_READ | PROT_WRITE,
		   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	if (mem == MAP_FAILED)
		kz_die(KZ_BROKEN, "mmap: %s", strerror(errno));
	if (syscall(SYS_mbind, mem, COUNT * size + PAGE, MPOL_INTERLEAVE, &nodes, 8, 0))
		kz_die(KZ_BROKEN, "mbind: %s; boot with numa=fake=2", strerror(errno));

	for (i = 0; i < COUNT; i++) {
		/* 7 is no divisor of a power of two: every place has its turn. */
		void *page = (void *)(first + i * size + (i * 7 * PAGE) % size);
		void *other = (void *)(first + i * size + ((i * 7 + 1) * PAGE) % size);
		int node;

		*(volatile unsigned char *)page = 1;
		node = node_of(page);
		same += node == last;
		last = node;
		/* The rest of the folio came with it. */
		alone += node_of(other) != node;
	}
	printf("{\"folios\": %lu, \"same_node\": %lu, \"not_large\": %lu}\n", COUNT, same, alone);
	return same ? KZ_FAILED : KZ_OK;
}
