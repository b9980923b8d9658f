// SPDX-License-Identifier: GPL-2.0
/*
 * scatter: fills memory and frees it in pieces on request, so that free blocks merge with neighbours that were
 * freed earlier.
 */
#include "common.h"

#include <getopt.h>

#define PAGE 4096UL
#define FILL 0x5a

static void usage(FILE *out)
{
	fprintf(out,
"usage: scatter [options]\n"
"Fills memory, then frees parts of it as stdin says. Each line of stdin is \"COUNT MS\": free the next\n"
"COUNT pages of each group, spread over MS milliseconds. Prints a JSON line when filled, and after each\n"
"line of stdin. Ends at the end of stdin.\n"
"  --size MB        amount to fill (default 128)\n"
"  --group PAGES    pages of a group (default 16)\n"
"  --large          groups are large folios, as far as the kernel is set up so; keeps every second one,\n"
"                   frees the others from their ends, and checks in the end what is kept\n"
"  --help           this text\n"
"Exit: 0 done, 1 wrong content, 2 bad usage, 3 the machine cannot do it.\n");
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{ "size", required_argument, NULL, 's' },
		{ "group", required_argument, NULL, 'g' },
		{ "large", no_argument, NULL, 'l' },
		{ "help", no_argument, NULL, 'h' },
		{ NULL, 0, NULL, 0 },
	};
	unsigned long size = 128 * KZ_MB, group = 16, freed = 0, groups, count, ms, i, at;
	char line[80], *mem;
	bool large = false;
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
		case 'l':
			large = true;
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

	mem = mmap(NULL, size + group * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (mem == MAP_FAILED)
		kz_die(KZ_BROKEN, "cannot map %lu MB: %s", size / KZ_MB, strerror(errno));
	mem += (group * PAGE - (uintptr_t)mem % (group * PAGE)) % (group * PAGE);
	if (!large)
		madvise(mem, size, MADV_NOHUGEPAGE);
	memset(mem, FILL, size);
	groups = size / PAGE / group;
	/* This splits the folio. */
	for (i = 1; large && i < groups; i += 2)
		if (madvise(mem + i * group * PAGE, PAGE, MADV_COLD))
			kz_die(KZ_BROKEN, "cannot split a folio: %s", strerror(errno));
	printf("{\"filled_bytes\": %lu, \"groups\": %lu}\n", size, groups);
	fflush(stdout);

	while (fgets(line, sizeof(line), stdin)) {
		if (sscanf(line, "%lu %lu", &count, &ms) != 2 || !count || count > group - freed)
			kz_die(KZ_USAGE, "bad line '%s': expected COUNT MS, with %lu pages left", line,
			       group - freed);
		at = large ? group - freed - count : freed;
		for (i = large; i < groups; i += 1 + large) {
			if (madvise(mem + (i * group + at) * PAGE, count * PAGE, MADV_DONTNEED))
				kz_die(KZ_BROKEN, "cannot free: %s", strerror(errno));
			if (ms && i % 16 == 15)
				usleep((useconds_t)(ms * 16000 / groups));
		}
		freed += count;
		printf("{\"freed_pages\": %lu}\n", groups / (1 + large) * count);
		fflush(stdout);
	}
	for (i = 0; large && i < groups; i += 2)
		for (at = i * group * PAGE; at < (i + 1) * group * PAGE; at++)
			if (mem[at] != FILL)
				kz_die(KZ_FAILED, "byte %lu of %lu has changed", at, size);
	return KZ_OK;
}
