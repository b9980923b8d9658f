// SPDX-License-Identifier: GPL-2.0
/*
 * corunner: follows pointers through its own memory, and prints its steps in a given time: fewer if
 * other code used its CPU or its cache. With --clear it zeroes other memory after each turn, which does
 * not count as its time.
 */
#include "common.h"

static const char usage[] =
"usage: corunner [options]\n"
"Reads and writes its memory in a random order for some time; prints one JSON line.\n"
"  --ms N           duration (default 2000)\n"
"  --size KB        its memory (default 1024)\n"
"  --clear HOW      after each turn through its memory, zero 2 MB of other memory\n"
"                   with ordinary stores (stos) or with stores that bypass the\n"
"                   caches (movnti); x86-64 only\n"
"  --help           this text\n"
"Exit: 0 done, 2 bad usage, 3 the machine cannot do it.\n";

#define LINE 64UL
#define STRIDE 1000UL
/* Much larger than the caches near a CPU; it is zeroed in parts of a huge page, as kzeropaged does. */
#define CLEAR_AREA (64 * KZ_MB)
#define CLEAR_BYTES KZ_HUGE

#ifdef __x86_64__
static void clear_stos(void *mem, size_t len)
{
	asm volatile("rep stosb" : "+D" (mem), "+c" (len) : "a" (0) : "memory");
}

static void clear_movnti(void *mem, size_t len)
{
	unsigned long *p = mem, *end = p + len / sizeof(*p);

	for (; p < end; p++)
		asm volatile("movnti %1, %0" : "=m" (*p) : "r" (0UL));
	asm volatile("sfence" ::: "memory");
}
#endif

static void (*find_clear(const char *how))(void *mem, size_t len)
{
#ifdef __x86_64__
	if (!strcmp(how, "stos"))
		return clear_stos;
	if (!strcmp(how, "movnti"))
		return clear_movnti;
#endif
	kz_die(KZ_USAGE, "--clear: '%s' is not stos or movnti, which x86-64 alone has; see corunner --help", how);
}

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
	unsigned long ms = 2000, size = 1024, steps = 0, cleared = 0;
	void (*clear)(void *mem, size_t len) = NULL;
	uint64_t *mem, at = 0, start, now, clear_ns = 0;
	unsigned char *area = NULL;
	const char *how = NULL;
	const struct kz_option options[] = {
		{ "ms", .number = &ms, .min = 1, .max = 1000000 },
		{ "size", .number = &size, .min = 1, .max = 1UL << 20 },
		{ "clear", .text = &how },
		{ 0 },
	};

	kz_only_options(argc, argv, "corunner", usage, options);
	if (how)
		clear = find_clear(how);
	mem = make_cycle(size * 1024 / LINE);
	if (clear) {
		area = aligned_alloc(KZ_HUGE, CLEAR_AREA);
		if (!area)
			kz_fail("cannot allocate %lu MB", CLEAR_AREA / KZ_MB);
		memset(area, 1, CLEAR_AREA);
	}
	start = kz_now_ns();
	do {
		unsigned long i;

		if (clear && at == 0) {
			uint64_t began = kz_now_ns();

			clear(area + cleared % CLEAR_AREA, CLEAR_BYTES);
			cleared += CLEAR_BYTES;
			clear_ns += kz_now_ns() - began;
		}
		/* To the end of the cycle, or STRIDE steps. */
		for (i = 0; i < STRIDE; i++) {
			mem[at * 8 + 1]++;
			at = mem[at * 8];
			if (clear && at == 0) {
				i++;
				break;
			}
		}
		steps += i;
		now = kz_now_ns();
	} while (now - start - clear_ns < ms * 1000000ULL);
	printf("{\"size_kb\": %lu, \"steps\": %lu, \"wall_ns\": %" PRIu64 ", \"end\": %" PRIu64
	       ", \"cleared_bytes\": %lu, \"clear_ns\": %" PRIu64 "}\n",
	       size, steps, now - start - clear_ns, at, cleared, clear_ns);
	return KZ_OK;
}
