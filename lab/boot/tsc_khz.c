// SPDX-License-Identifier: GPL-2.0
/*
 * tsc_khz: how fast this machine's time stamp counter counts, in kHz.
 *
 * The clock is read between two reads of the counter. The two that lie closest together count, so that an
 * interrupt in between does not spoil the figure.
 */
#include <stdint.h>
#include <stdio.h>
#include <time.h>
#include <x86intrin.h>

enum { TRIES = 1000, APART_MS = 100 };

static void read_both(double *ns, uint64_t *ticks)
{
	uint64_t closest = UINT64_MAX;
	int i;

	for (i = 0; i < TRIES; i++) {
		const uint64_t before = __rdtsc();
		struct timespec now;
		uint64_t after;

		clock_gettime(CLOCK_MONOTONIC_RAW, &now);
		after = __rdtsc();
		if (after - before < closest) {
			closest = after - before;
			*ns = (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
			*ticks = before + closest / 2;
		}
	}
}

int main(void)
{
	const struct timespec apart = { .tv_nsec = APART_MS * 1000000 };
	uint64_t ticks[2];
	double ns[2];

	read_both(&ns[0], &ticks[0]);
	nanosleep(&apart, NULL);
	read_both(&ns[1], &ticks[1]);
	printf("%.0f\n", (double)(ticks[1] - ticks[0]) * 1e6 / (ns[1] - ns[0]));
	return 0;
}
