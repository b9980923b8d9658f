// SPDX-License-Identifier: GPL-2.0
/*
 * interleave: allocates large folios under the interleave policy, each by a fault at another place in
 * it, in a mapping that does not begin on a folio boundary. mprotect() splits the mapping in its middle,
 * on a folio boundary. Neighbours must be on different nodes.
 */
#include "common.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>

#define PAGE 4096UL
#define COUNT 64UL

static const char usage[] =
"usage: interleave [options]\n"
"Interleaves large folios over nodes 0 and 1; prints one JSON line with the result.\n"
"The sysfs switches of the size must be on.\n"
"Options:\n"
"  --size KB    size of the folios, a power of two (default 64)\n"
"  --help       this text\n"
"Exit: 0 done, 1 neighbours are on one node, 2 bad usage, 3 the machine cannot do it.\n";

/* The node of the page that is mapped at an address. */
static int node_of(void *page)
{
	int node = -1;

	if (syscall(SYS_get_mempolicy, &node, NULL, 0UL, page, MPOL_F_NODE | MPOL_F_ADDR))
		kz_fail("get_mempolicy");
	return node;
}

int main(int argc, char **argv)
{
	unsigned long kb = 64, size, nodes = 3, i, same = 0, alone = 0;
	uintptr_t first;
	unsigned char *mem;
	int last = -1;
	const struct kz_option options[] = {
		{ "size", .number = &kb, .min = 8, .max = 1024 },
		{ 0 },
	};

	kz_only_options(argc, argv, "interleave", usage, options);
	if (kb & (kb - 1))
		kz_die(KZ_USAGE, "--size: %lu is no power of two; see interleave --help", kb);
	size = kb * 1024;

	mem = mmap(NULL, (COUNT + 3) * size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (mem == MAP_FAILED)
		kz_fail("cannot map %lu folios", COUNT);
	first = ((uintptr_t)mem + 2 * size - 1) & ~(size - 1);
	/* From an odd page before the first folio on. */
	mem = mmap((void *)(first - PAGE), COUNT * size + PAGE, PROT_READ | PROT_WRITE,
		   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	if (mem == MAP_FAILED)
		kz_fail("cannot map %lu folios", COUNT);
	if (syscall(SYS_mbind, mem, COUNT * size + PAGE, MPOL_INTERLEAVE, &nodes, 8, 0))
		kz_die(KZ_BROKEN, "cannot interleave over nodes 0 and 1: %s; boot with numa=fake=2", strerror(errno));

	for (i = 0; i < COUNT; i++) {
		/* 7 does not divide a power of two, so each place has its turn. */
		void *page = (void *)(first + i * size + (i * 7 * PAGE) % size);
		void *other = (void *)(first + i * size + ((i * 7 + 1) * PAGE) % size);
		int node;

		if (i == COUNT / 2 && mprotect((void *)(first - PAGE), PAGE + i * size, PROT_READ))
			kz_fail("cannot split the mapping");
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
