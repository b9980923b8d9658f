// SPDX-License-Identifier: GPL-2.0
/*
 * native_costs: how fast this CPU computes and stores, and what the operations cost that trap to a
 * hypervisor without hardware support. The lab compares a guest's figures with those of its host.
 */
#include <sys/syscall.h>

#include "common.h"

static const char usage[] =
"usage: native_costs [options]\n"
"Times a loop, the clearing of memory, and some operations that may trap; prints one JSON line.\n"
"  --help           this text\n"
"Exit: 0 done, 2 bad usage, 3 the machine cannot do it.\n";

#define REPS 9
#define SLOW_REPS 3
#define ADDITIONS 1000000000UL
#define TURN 10			/* a jump for each addition would measure how the code is aligned */
#define CLEARED (1024 * KZ_MB)
#define AREA (256 * KZ_MB)
#define SMALL (8 * KZ_MB)
#define CALLS 10000
#define CPUIDS 1000
#define PAGE 4096UL

static int compare(const void *a, const void *b)
{
	const double *x = a, *y = b;

	return (*x > *y) - (*x < *y);
}

static double median(double *values, int count)
{
	qsort(values, count, sizeof(*values), compare);
	return values[count / 2];
}

static void *map(size_t bytes, int advice)
{
	char *mem = kz_map(bytes + KZ_HUGE, 0);

	mem = (char *)(((uintptr_t)mem + KZ_HUGE - 1) & ~(KZ_HUGE - 1));
	madvise(mem, bytes, advice);
	return mem;
}

static double loop(void)
{
	uint64_t began = kz_now_ns(), left = ADDITIONS / TURN;

	asm volatile("1: .rept %c1\n\tadd $3, %%rax\n\t.endr\n\tdec %0; jnz 1b"
		     : "+r" (left) : "i" (TURN) : "rax", "cc");
	return kz_now_ns() - began;
}

/* Without the faults: the caller has touched the memory. */
static double clear(void *area)
{
	uint64_t began = kz_now_ns();
	size_t done;

	for (done = 0; done < CLEARED; done += AREA) {
		void *mem = area;
		size_t len = AREA;

		asm volatile("rep stosb" : "+D" (mem), "+c" (len) : "a" (0) : "memory");
	}
	return kz_now_ns() - began;
}

static double fault(char *area)
{
	uint64_t began = kz_now_ns();
	size_t at;

	for (at = 0; at < SMALL; at += PAGE)
		area[at] = 1;
	return (double)(kz_now_ns() - began) / (SMALL / PAGE);
}

static double system_call(void)
{
	uint64_t began = kz_now_ns();
	int i;

	for (i = 0; i < CALLS; i++)
		syscall(SYS_getppid);
	return (double)(kz_now_ns() - began) / CALLS;
}

/* Each entry is changed twice. */
static double entry(void *area)
{
	uint64_t began = kz_now_ns();

	if (mprotect(area, SMALL, PROT_READ) || mprotect(area, SMALL, PROT_READ | PROT_WRITE))
		kz_fail("cannot protect %lu MB", SMALL / KZ_MB);
	return (double)(kz_now_ns() - began) / (2 * SMALL / PAGE);
}

/* CPUID always leaves a guest. */
static double leave(void)
{
	uint64_t began = kz_now_ns();
	int i;

	for (i = 0; i < CPUIDS; i++) {
		unsigned int a = 0, b, c = 0, d;

		asm volatile("cpuid" : "+a" (a), "=b" (b), "+c" (c), "=d" (d));
	}
	return (double)(kz_now_ns() - began) / CPUIDS;
}

int main(int argc, char **argv)
{
	double loops[SLOW_REPS], clears[SLOW_REPS], faults[REPS], calls[REPS], entries[REPS];
	double leaves[REPS];
	const struct kz_option options[] = { { 0 } };
	char *large, *small;
	int i;

	kz_only_options(argc, argv, "native_costs", usage, options);
	large = map(AREA, MADV_HUGEPAGE);
	small = map(SMALL, MADV_NOHUGEPAGE);
	memset(large, 1, AREA);
	for (i = 0; i < SLOW_REPS; i++) {
		loops[i] = loop();
		clears[i] = clear(large);
	}
	for (i = 0; i < REPS; i++) {
		faults[i] = fault(small);
		entries[i] = entry(small);
		madvise(small, SMALL, MADV_DONTNEED);
		calls[i] = system_call();
		leaves[i] = leave();
	}
	printf("{\"loop_ns\": %.0f, \"clear_ns\": %.0f, \"fault_ns\": %.0f, \"syscall_ns\": %.0f, \"pte_ns\": %.0f, \"exit_ns\": %.0f}\n",
	       median(loops, SLOW_REPS), median(clears, SLOW_REPS), median(faults, REPS),
	       median(calls, REPS), median(entries, REPS), median(leaves, REPS));
	return KZ_OK;
}
