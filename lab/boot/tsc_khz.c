// SPDX-License-Identifier: GPL-2.0
/*
 * tsc_khz: how fast this machine's time stamp counter counts, in kHz.
 *
 * The clock is read between two reads of the counter, and the reads that lie closest together count: whoever
 * is interrupted in between does not spoil the figure.
 */
#include <stdint.h>
#include <stdio.h>
#include <time.h>
#include <x86intrin.h>

enum { TRIES = 1000, APART_MS = 100 };

static uint64_t clock_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC_RAW, &now);
	return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static void read_both(uint64_t *ns, uint64_t *ticks)
{
	uint64_t closest = UINT64_MAX;
	int i;

	for (i = 0; i < TRIES; i++) {
		const uint64_t before = __rdtsc(), now = clock_ns(), after = __rdtsc();

		if (after - before < closest) {
			closest = after - before;
			*ns = now;
			*ticks = before + closest / 2;
		}
	}
}

int main(void)
{
	const struct timespec apart = { .tv_nsec = APART_MS * 1000000 };
	uint64_t ns[2], ticks[2];

	read_both(&ns[0], &ticks[0]);
	nanosleep(&apart, NULL);
	read_both(&ns[1], &ticks[1]);
	printf("%.0f\n", (double)(ticks[1] - ticks[0]) * 1e6 / (double)(ns[1] - ns[0]));
	return 0;
}
