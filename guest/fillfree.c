// SPDX-License-Identifier: GPL-2.0
/*
 * fillfree: makes free memory dirty. It fills a share of the free memory with a byte and gives
 * it back, so that whatever is allocated next came from memory that was not zero.
 */
#include "common.h"

#include <getopt.h>
#include <signal.h>

static void usage(FILE *out)
{
	fprintf(out,
"usage: fillfree [options]\n"
"Fills free memory with a byte and frees it again; prints one JSON line.\n"
"  --share PERCENT  how much of MemFree to fill (default 85)\n"
"  --size MB        a fixed size instead of a share\n"
"  --byte VALUE     the byte (default 0x5a)\n"
"  --nothp          use small pages only\n"
"  --gaps KB        when filled, give back every other so many KB, so that free memory is in\n"
"                   pieces as small as that; the rest is freed in the end\n"
"  --hold           print the line when filled, keep the memory until a line comes in on\n"
"                   stdin, then free it\n"
"  --help           this text\n"
"Exit: 0 done, 2 bad usage, 3 the machine cannot do it.\n");
}

/* Chunks, so that memory that ran short ends the filling and does not kill the program. */
#define CHUNK (16UL * KZ_MB)

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{ "share", required_argument, NULL, 's' },
		{ "size", required_argument, NULL, 'm' },
		{ "byte", required_argument, NULL, 'b' },
		{ "nothp", no_argument, NULL, 'n' },
		{ "gaps", required_argument, NULL, 'g' },
		{ "hold", no_argument, NULL, 'o' },
		{ "help", no_argument, NULL, 'h' },
		{ NULL, 0, NULL, 0 },
	};
	unsigned long share = 85, size = 0, target, filled = 0, reserve = 24 * KZ_MB, gaps = 0, at;
	bool nothp = false, hold = false;
	int byte = 0x5a, opt;
	uint64_t start;
	char *mem;

	kz_program = "fillfree";
	while ((opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (opt) {
		case 's':
			share = kz_number("--share", optarg, 1, 100);
			break;
		case 'm':
			size = kz_number("--size", optarg, 1, 1UL << 20) * KZ_MB;
			break;
		case 'b':
			byte = (int)kz_number("--byte", optarg, 0, 255);
			break;
		case 'n':
			nothp = true;
			break;
		case 'g':
			gaps = kz_number("--gaps", optarg, 4, CHUNK / 1024) * 1024;
			break;
		case 'o':
			hold = true;
			break;
		case 'h':
			usage(stdout);
			return KZ_OK;
		default:
			usage(stderr);
			return KZ_USAGE;
		}
	}
	if (optind < argc)
		kz_die(KZ_USAGE, "unexpected argument '%s'; see --help", argv[optind]);

	/* If memory runs out all the same, this is the one to kill. */
	kz_write_file("/proc/self/oom_score_adj", "1000");
	target = size ? size : kz_meminfo("MemFree") / 100 * share;
	target = (target + CHUNK - 1) / CHUNK * CHUNK;
	mem = mmap(NULL, target, PROT_READ | PROT_WRITE,
		   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (mem == MAP_FAILED)
		kz_die(KZ_BROKEN, "cannot map %lu MB: %s", target / KZ_MB, strerror(errno));
	madvise(mem, target, nothp ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
	start = kz_now_ns();
	while (filled < target && kz_meminfo("MemFree") > reserve + CHUNK) {
		memset(mem + filled, byte, CHUNK);
		filled += CHUNK;
	}
	for (at = gaps; gaps && at + gaps <= filled; at += 2 * gaps)
		if (madvise(mem + at, gaps, MADV_DONTNEED))
			kz_die(KZ_USAGE, "cannot give back pieces of %lu KB: %s", gaps / 1024, strerror(errno));
	printf("{\"filled_bytes\": %lu, \"wanted_bytes\": %lu, \"byte\": %d, \"wall_ns\": %" PRIu64
	       "}\n", filled, target, byte, kz_now_ns() - start);
	fflush(stdout);
	if (hold)
		while (getchar() != '\n' && !feof(stdin))
			;
	munmap(mem, target);
	return KZ_OK;
}
