// SPDX-License-Identifier: GPL-2.0
/*
 * fillfree: makes free memory dirty. It fills a share of the free memory with a byte and frees it, so
 * that the next allocations get dirty memory.
 */
#include "common.h"

#include <signal.h>

static const char usage[] =
"usage: fillfree [options]\n"
"Fills free memory with a byte and frees it again; prints one JSON line.\n"
"  --share PERCENT  the part of MemFree to fill (default 85)\n"
"  --size MB        a fixed size instead of a share\n"
"  --byte VALUE     the byte (default 0x5a)\n"
"  --nothp          use small pages only\n"
"  --gaps KB        when filled, free every other piece of KB kilobytes, so that free memory is\n"
"                   in such pieces; the rest is freed in the end\n"
"  --hold           print the line when filled, and free the memory when stdin has a line\n"
"  --help           this text\n"
"Exit: 0 done, 2 bad usage, 3 the machine cannot do it.\n";

/* It fills by chunks, so that a shortage of memory ends the filling only. */
#define CHUNK (16UL * KZ_MB)

int main(int argc, char **argv)
{
	unsigned long share = 85, size = 0, target, filled = 0, reserve = 24 * KZ_MB, gaps = 0, at, byte = 0x5a;
	bool nothp = false, hold = false;
	uint64_t start;
	char *mem;
	const struct kz_option options[] = {
		{ "share", .number = &share, .min = 1, .max = 100 },
		{ "size", .number = &size, .min = 1, .max = 1UL << 20 },
		{ "byte", .number = &byte, .max = 255 },
		{ "nothp", .flag = &nothp },
		{ "gaps", .number = &gaps, .min = 4, .max = CHUNK / 1024 },
		{ "hold", .flag = &hold },
		{ 0 },
	};

	kz_only_options(argc, argv, "fillfree", usage, options);
	size *= KZ_MB;
	gaps *= 1024;

	/* The OOM killer takes this process first. */
	kz_write_file("/proc/self/oom_score_adj", "1000");
	target = size ? size : kz_meminfo("MemFree") / 100 * share;
	target = (target + CHUNK - 1) / CHUNK * CHUNK;
	mem = mmap(NULL, target, PROT_READ | PROT_WRITE,
		   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (mem == MAP_FAILED)
		kz_fail("cannot map %lu MB", target / KZ_MB);
	madvise(mem, target, nothp ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
	start = kz_now_ns();
	while (filled < target && kz_meminfo("MemFree") > reserve + CHUNK) {
		memset(mem + filled, (int)byte, CHUNK);
		filled += CHUNK;
	}
	for (at = gaps; gaps && at + gaps <= filled; at += 2 * gaps)
		if (madvise(mem + at, gaps, MADV_DONTNEED))
			kz_die(KZ_USAGE, "--gaps: cannot free pieces of %lu KB: %s; use a multiple of the page size",
			       gaps / 1024, strerror(errno));
	printf("{\"filled_bytes\": %lu, \"wanted_bytes\": %lu, \"byte\": %lu, \"wall_ns\": %" PRIu64
	       "}\n", filled, target, byte, kz_now_ns() - start);
	fflush(stdout);
	if (hold)
		while (getchar() != '\n' && !feof(stdin))
			;
	munmap(mem, target);
	return KZ_OK;
}
