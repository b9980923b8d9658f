// SPDX-License-Identifier: GPL-2.0
/*
 * scatter: fills memory with small pages and frees it in pieces on request, so that free blocks merge with
 * neighbours that were freed earlier.
 */
#include "common.h"

#include <getopt.h>

#define PAGE 4096UL

static void usage(FILE *out)
{
	fprintf(out,
"usage: scatter [options]\n"
"Fills memory, then frees parts of it as stdin says. Each line of stdin is \"COUNT MS\": free the next\n"
"COUNT pages of each group, spread over MS milliseconds. Prints a JSON line when filled, and after each\n"
"line of stdin. Ends at the end of stdin.\n"
"  --size MB        amount to fill (default 128)\n"
"  --group PAGES    pages of a group (default 16)\n"
"  --help           this text\n"
"Exit: 0 done, 2 bad usage, 3 the machine cannot do it.\n");
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{ "size", required_argument, NULL, 's' },
		{ "group", required_argument, NULL, 'g' },
		{ "help", no_argument, NULL, 'h' },
		{ NULL, 0, NULL, 0 },
	};
	unsigned long size = 128 * KZ_MB, group = 16, freed = 0, groups, count, ms, i;
	char line[80], *mem;
	int opt;

	kz_program = "scatter";
	while ((opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (opt) {
		case 's':
			size = kz_number("--size", optarg, 1, 1UL << 20) * KZ_MB;
			break;
		case 'g':
			group = kz_number("--group", optarg, 2, 1UL << 18);
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

	mem = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (mem == MAP_FAILED)
		kz_die(KZ_BROKEN, "cannot map %lu MB: %s", size / KZ_MB, strerror(errno));
	madvise(mem, size, MADV_NOHUGEPAGE);
	memset(mem, 0x5a, size);
	groups = size / PAGE / group;
	printf("{\"filled_bytes\": %lu, \"groups\": %lu}\n", size, groups);
	fflush(stdout);

	while (fgets(line, sizeof(line), stdin)) {
		if (sscanf(line, "%lu %lu", &count, &ms) != 2 || !count || count > group - freed)
			kz_die(KZ_USAGE, "bad line '%s': expected COUNT MS, with %lu pages left", line,
			       group - freed);
		for (i = 0; i < groups; i++) {
			if (madvise(mem + (i * group + freed) * PAGE, count * PAGE, MADV_DONTNEED))
				kz_die(KZ_BROKEN, "cannot free: %s", strerror(errno));
			if (ms && i % 16 == 15)
				usleep((useconds_t)(ms * 16000 / groups));
		}
		freed += count;
		printf("{\"freed_pages\": %lu}\n", groups * count);
		fflush(stdout);
	}
	return KZ_OK;
}
