// SPDX-License-Identifier: GPL-2.0
/*
 * refpage_heap: an example of refpage_create(2) in an allocator that hands out memory with a
 * pattern in it, so that a use of uninitialised memory shows. Large allocations are mappings of
 * their own, as in most allocators; they get the pattern by memset() or from a reference page.
 *
 * The job allocates tables of their largest size and uses a part of each.
 */
#include "common.h"

#include <sys/syscall.h>

#ifndef __NR_refpage_create
#define __NR_refpage_create 473
#endif

#define PAGE 4096UL

static const char usage[] =
"usage: refpage_heap [options]\n"
"Allocates tables that start with a pattern, uses a part of each, frees them; prints one JSON line.\n"
"  --init HOW     memset   the allocator writes the pattern (default)\n"
"                 refpage  the allocator maps a reference page\n"
"                 auto     refpage where the kernel has it, memset elsewhere\n"
"                 none     memory starts as zeros\n"
"  --size BYTES   of a table (default 1048576)\n"
"  --used PERCENT the part of a table that is used (default 10)\n"
"  --tables N     tables, one after the other (default 200)\n"
"  --help         this text\n"
"Exit: 0 done, 1 memory did not start with the pattern, 2 bad usage, 3 the machine cannot do it.\n";

enum init { INIT_NONE, INIT_MEMSET, INIT_REFPAGE, INIT_AUTO };

static const char *const init_names[] = { "none", "memset", "refpage", "auto", NULL };

/*
 * The allocator. heap_start() makes its file once, at the first use.
 */
static struct {
	enum init init;
	unsigned char fill;
	int fd;
} heap = { .init = INIT_MEMSET, .fill = 0xcd, .fd = -1 };

static void heap_start(void)
{
	if (heap.init != INIT_REFPAGE && heap.init != INIT_AUTO)
		return;
	/* The page repeats the byte. */
	heap.fd = (int)syscall(__NR_refpage_create, &heap.fill, sizeof(heap.fill), 0);
	if (heap.fd >= 0) {
		heap.init = INIT_REFPAGE;
		return;
	}
	if (heap.init == INIT_REFPAGE || errno != ENOSYS)
		kz_fail("refpage_create");
	/* An older kernel, or one without CONFIG_REFPAGE. */
	heap.init = INIT_MEMSET;
}

static void *heap_alloc(size_t size)
{
	const bool reference = heap.init == INIT_REFPAGE;
	void *mem = mmap(NULL, size, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | (reference ? 0 : MAP_ANONYMOUS), reference ? heap.fd : -1, 0);

	if (mem == MAP_FAILED)
		return NULL;
	if (heap.init == INIT_MEMSET)
		memset(mem, heap.fill, size);
	return mem;
}

static void heap_free(void *mem, size_t size)
{
	munmap(mem, size);
}

int main(int argc, char **argv)
{
	unsigned long size = KZ_MB, used = 10, tables = 200, table, i;
	unsigned char want;
	struct rusage usage_now;
	uint64_t start, wall;
	const struct kz_option options[] = {
		{ "init", .choice = &heap.init, .choices = init_names },
		{ "size", .number = &size, .min = PAGE, .max = SIZE_MAX >> 1 },
		{ "used", .number = &used, .max = 100 },
		{ "tables", .number = &tables, .min = 1, .max = 1000000000 },
		{ 0 },
	};

	kz_only_options(argc, argv, "refpage_heap", usage, options);

	start = kz_now_ns();
	heap_start();
	want = heap.init == INIT_NONE ? 0 : heap.fill;
	for (table = 0; table < tables; table++) {
		unsigned char *mem = heap_alloc(size);

		if (!mem)
			kz_fail("cannot allocate %lu bytes", size);
		for (i = 0; i < size / 100 * used; i += 64) {
			if (mem[i] != want)
				kz_die(KZ_FAILED, "byte %lu of a table is 0x%02x, not 0x%02x: it was not initialised; see the kernel log (dmesg)",
				       i, mem[i], want);
			mem[i] = (unsigned char)i;
		}
		heap_free(mem, size);
	}
	wall = kz_now_ns() - start;
	getrusage(RUSAGE_SELF, &usage_now);
	printf("{\"init\": \"%s\", \"size\": %lu, \"used_percent\": %lu, \"tables\": %lu, "
	       "\"wall_ns\": %" PRIu64 ", \"max_rss_kb\": %ld, \"minor_faults\": %ld}\n",
	       init_names[heap.init], size, used, tables, wall, usage_now.ru_maxrss,
	       usage_now.ru_minflt);
	return KZ_OK;
}
