// SPDX-License-Identifier: GPL-2.0
/*
 * tsc_khz: prints how fast the time stamp counter of an x86-64 processor counts, in kHz.
 *
 * The clock is read between two reads of the counter. The two that lie closest together count, so that an
 * interrupt in between does not spoil the figure.
 */
#include "common.h"

#include <x86intrin.h>

static const char usage[] =
"usage: tsc_khz\n"
"Prints how fast the time stamp counter counts, in kHz; takes a tenth of a second.\n"
"  --help           this text\n"
"Exit: 0 done, 2 bad usage.\n";

enum { TRIES = 1000, APART_MS = 100 };

static double read_both(uint64_t *ticks)
{
	uint64_t closest = UINT64_MAX;
	double ns = 0;
	int i;

	for (i = 0; i < TRIES; i++) {
		const uint64_t before = __rdtsc();
		struct timespec now;
		uint64_t after;

		clock_gettime(CLOCK_MONOTONIC_RAW, &now);
		after = __rdtsc();
		if (after - before < closest) {
			closest = after - before;
			ns = (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
			*ticks = before + closest / 2;
		}
	}
	return ns;
}

int main(int argc, char **argv)
{
	const struct timespec apart = { .tv_nsec = APART_MS * 1000000 };
	static const struct kz_option options[] = { { 0 } };
	uint64_t ticks[2];
	double ns[2];

	kz_only_options(argc, argv, "tsc_khz", usage, options);
	ns[0] = read_both(&ticks[0]);
	nanosleep(&apart, NULL);
	ns[1] = read_both(&ticks[1]);
	printf("%.0f\n", (double)(ticks[1] - ticks[0]) * 1e6 / (ns[1] - ns[0]));
	return 0;
}
