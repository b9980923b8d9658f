// SPDX-License-Identifier: GPL-2.0
/*
 * corunner: follows pointers through its own memory, and prints its steps in a given time: fewer if
 * other code used its CPU or its cache.
 */
#include "common.h"

static const char usage[] =
"usage: corunner [options]\n"
"Reads and writes its memory in a random order for some time; prints one JSON line.\n"
"  --ms N           duration (default 2000)\n"
"  --size KB        its memory (default 1024)\n"
"  --help           this text\n"
"Exit: 0 done, 2 bad usage, 3 the machine cannot do it.\n";

#define LINE 64UL
#define STRIDE 1000UL
/* Every cache line points to the next one, in one cycle through all of them. */
static uint64_t *make_cycle(unsigned long lines)
{
	uint64_t *mem = aligned_alloc(4096, lines * LINE);
	unsigned long i;

	if (!mem)
		kz_fail("cannot allocate %lu KB", lines * LINE / 1024);
	for (i = 0; i < lines; i++)
		mem[i * 8] = i;
	for (i = lines - 1; i; i--) {
		unsigned long j;
		uint64_t swap;

		/* Sattolo's algorithm: with j < i there is one cycle only. */
		j = kz_rng() % i;
		swap = mem[i * 8];
		mem[i * 8] = mem[j * 8];
		mem[j * 8] = swap;
	}
	return mem;
}

int main(int argc, char **argv)
{
	unsigned long ms = 2000, size = 1024, steps = 0;
	uint64_t *mem, at = 0, start, now;
	const struct kz_option options[] = {
		{ "ms", .number = &ms, .min = 1, .max = 1000000 },
		{ "size", .number = &size, .min = 1, .max = 1UL << 20 },
		{ 0 },
	};

	kz_only_options(argc, argv, "corunner", usage, options);
	mem = make_cycle(size * 1024 / LINE);
	start = kz_now_ns();
	do {
		unsigned long i;

		for (i = 0; i < STRIDE; i++) {
			mem[at * 8 + 1]++;
			at = mem[at * 8];
		}
		steps += STRIDE;
		now = kz_now_ns();
	} while (now - start < ms * 1000000ULL);
	printf("{\"size_kb\": %lu, \"steps\": %lu, \"wall_ns\": %" PRIu64 ", \"end\": %" PRIu64 "}\n",
	       size, steps, now - start, at);
	return KZ_OK;
}
