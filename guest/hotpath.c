// SPDX-License-Identifier: GPL-2.0
/*
 * hotpath: times short kernel paths, one repetition at a time.
 *
 * Under QEMU's `-icount shift=0` every instruction advances the guest's clock by one nanosecond,
 * and the TSC of an emulated x86 CPU runs at 1 GHz. Ticks are then instructions, exactly, and equal in
 * each run. A repetition is shorter than a timer tick, so that the median is free of interrupts.
 */
#include "common.h"

#include <sys/syscall.h>

#ifndef SYS_listmount
#define SYS_listmount 458
#endif

static const char usage[] =
"usage: hotpath [options] [PATH...]\n"
"Times kernel paths; one JSON line per path with the cost of one iteration.\n"
"Under -icount shift=0 the unit is one instruction, otherwise one tick of the clock.\n"
"Paths (default: all but new_* and over_limit):\n"
"  fault        write fault on an anonymous 4 KiB page, with its share of MADV_DONTNEED\n"
"  thp_fault    write fault on a 2 MiB page, with its MADV_DONTNEED\n"
"  new_fault    write fault on a 4 KiB page that is kept: each fault gets another page\n"
"  new_thp      write fault on a 2 MiB page that is kept\n"
"  pipe_deep    16 one-byte packets into a pipe and out of it again: each needs a page\n"
"  pipe_cached  the same 16 packets one by one: the pipe keeps its page, none is allocated\n"
"  alloc_free   an order-0 page allocated and freed: (pipe_deep - pipe_cached) / pages\n"
"  buddy        the same with 224 packets, so that the per-CPU list overflows to the buddy lists\n"
"  order3       32 KiB of one block allocated and freed: list3 - list0\n"
"  order9       2 MiB of one block allocated and freed: list9 - list0\n"
"  list3, list9 listmount(2) with room for 4096 and for 262144 mounts, which the kernel allocates\n"
"  list0        the same with room for none: nothing is allocated\n"
"  populate     MADV_POPULATE_WRITE of a 4 KiB page, with its share of MADV_DONTNEED\n"
"  over_limit   write fault where the memory cgroup has no room for a huge page (needs cgroup v2)\n"
"  fork         fork, exit and wait\n"
"  exec         fork, execve of this program, exit and wait\n"
"Options:\n"
"  --reps N     repetitions per path (default 101)\n"
"  --exit       end at once: it is what exec executes\n"
"  --help       this text\n"
"Exit: 0 done, 2 bad usage, 3 the machine cannot do it.\n";

static void must(bool good, const char *what)
{
	if (!good)
		kz_fail("%s", what);
}

static inline uint64_t ticks(void)
{
#if defined(__x86_64__)
	uint32_t lo, hi;

	__asm__ volatile("lfence; rdtsc; lfence" : "=a"(lo), "=d"(hi) : : "memory");
	return (uint64_t)hi << 32 | lo;
#else
	return kz_now_ns();
#endif
}

#define FAULT_PAGES 32
#define PIPE_DEPTH 16
/*
 * A pipe keeps the first eight pages that are read empty; the next write takes one of them and
 * gives five back, the two writes after it take the last two. Three of a round are not allocated.
 */
#define PIPE_KEPT 3
#define BUDDY_DEPTH 224

#define WARM_UPS 16

static char *small, *huge;
/* Memory that was never written to. */
static char *fresh;
static int shallow[2], deep[2];

static void run_fault(void)
{
	int i;

	for (i = 0; i < FAULT_PAGES; i++)
		((volatile char *)small)[i * 4096] = 1;
	madvise(small, FAULT_PAGES * 4096, MADV_DONTNEED);
}

static void run_populate(void)
{
	must(!madvise(small, FAULT_PAGES * 4096, MADV_POPULATE_WRITE), "MADV_POPULATE_WRITE");
	madvise(small, FAULT_PAGES * 4096, MADV_DONTNEED);
}

static void run_thp_fault(void)
{
	*(volatile char *)huge = 1;
	madvise(huge, KZ_HUGE, MADV_DONTNEED);
}

static void run_new_fault(void)
{
	int i;

	for (i = 0; i < FAULT_PAGES; i++, fresh += 4096)
		*(volatile char *)fresh = 1;
}

static void run_new_thp(void)
{
	*(volatile char *)fresh = 1;
	fresh += KZ_HUGE;
}

static void fill_and_drain(int fds[2], int depth)
{
	char byte = 1;
	int i;

	for (i = 0; i < depth; i++)
		must(write(fds[1], &byte, 1) == 1, "pipe write");
	for (i = 0; i < depth; i++)
		must(read(fds[0], &byte, 1) == 1, "pipe read");
}

static void one_by_one(int fds[2], int depth)
{
	char byte = 1;
	int i;

	for (i = 0; i < depth; i++) {
		must(write(fds[1], &byte, 1) == 1, "pipe write");
		must(read(fds[0], &byte, 1) == 1, "pipe read");
	}
}

static void run_pipe_deep(void) { fill_and_drain(shallow, PIPE_DEPTH); }
static void run_pipe_cached(void) { one_by_one(shallow, PIPE_DEPTH); }
static void run_buddy_deep(void) { fill_and_drain(deep, BUDDY_DEPTH); }
static void run_buddy_cached(void) { one_by_one(deep, BUDDY_DEPTH); }

/*
 * listmount() allocates room for @count numbers with kvmalloc() before it looks for mounts. The request
 * starts after the last possible mount, so the kernel finds none.
 */
static void list_mounts(size_t count)
{
	static const struct {
		uint32_t size, spare;
		uint64_t mount, after;
	} request = { sizeof(request), 0, UINT64_MAX, UINT64_MAX - 1 };

	must(!syscall(SYS_listmount, &request, small, count, 0), "listmount");
}

static void run_list0(void) { list_mounts(0); }
static void run_list3(void) { list_mounts((32 << 10) / sizeof(uint64_t)); }
static void run_list9(void) { list_mounts(KZ_HUGE / sizeof(uint64_t)); }

static void run_fork(void)
{
	int status;
	pid_t pid = fork();

	must(pid >= 0, "fork");
	if (!pid)
		_exit(0);
	must(waitpid(pid, &status, 0) == pid, "waitpid");
}

static void run_exec(void)
{
	static char *const argv[] = { (char *)"hotpath", (char *)"--exit", NULL };
	static char *const envp[] = { NULL };
	int status;
	pid_t pid = fork();

	must(pid >= 0, "fork");
	if (!pid) {
		execve("/proc/self/exe", argv, envp);
		_exit(KZ_BROKEN);
	}
	must(waitpid(pid, &status, 0) == pid, "waitpid");
	if (!WIFEXITED(status) || WEXITSTATUS(status))
		kz_fail("cannot execute /proc/self/exe");
}

struct cost {
	double min, median, p10, p90;
};

static int compare(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return x < y ? -1 : x > y;
}

static uint64_t *samples;

static struct cost time_path(void (*run)(void), unsigned long reps, double iterations)
{
	unsigned long i;
	struct cost cost;

	for (i = 0; i < WARM_UPS; i++)
		run();
	for (i = 0; i < reps; i++) {
		uint64_t start = ticks();

		run();
		samples[i] = ticks() - start;
	}
	qsort(samples, reps, sizeof(*samples), compare);
	cost.min = (double)samples[0] / iterations;
	cost.median = (double)samples[reps / 2] / iterations;
	cost.p10 = (double)samples[reps / 10] / iterations;
	cost.p90 = (double)samples[reps - 1 - reps / 10] / iterations;
	return cost;
}

static void print_cost(const char *path, struct cost c, unsigned long reps)
{
	printf("{\"path\": \"%s\", \"min\": %.3f, \"p10\": %.3f, \"median\": %.3f, "
	       "\"p90\": %.3f, \"n\": %lu}\n", path, c.min, c.p10, c.median, c.p90, reps);
	fflush(stdout);
}

/* The cost of pages alone: the packets that needed one less the packets that did not. */
static struct cost less(struct cost with, struct cost without, double pages)
{
	struct cost c = {
		.min = (with.min - without.min) / pages,
		.median = (with.median - without.median) / pages,
		.p10 = (with.p10 - without.p10) / pages,
		.p90 = (with.p90 - without.p90) / pages,
	};

	return c;
}

static void open_pipe(int fds[2], int depth)
{
	/* O_DIRECT: every write is a packet with a page of its own. */
	must(!pipe2(fds, O_DIRECT | O_CLOEXEC), "pipe2");
	must(fcntl(fds[1], F_SETPIPE_SZ, depth * 4096) >= depth * 4096, "F_SETPIPE_SZ");
}

static void *map_anonymous(size_t bytes, size_t align, int advice);

/* A path that takes each time the next part of a mapping. */
static void time_fresh(const char *name, void (*run)(void), unsigned long reps, size_t bytes, int pages)
{
	const size_t size = (reps + WARM_UPS) * bytes;
	char *start = map_anonymous(size, KZ_HUGE, pages == 1 ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);

	fresh = start;
	print_cost(name, time_path(run, reps, pages), reps);
	munmap(start, size);
}

#define GROUP "/sys/fs/cgroup/hotpath"
#define LIMIT (16 * KZ_MB)

static void must_write(const char *path, const char *text)
{
	if (kz_write_file(path, text))
		kz_die(KZ_BROKEN, "%s: cannot write '%s'; mount cgroup v2 at /sys/fs/cgroup", path, text);
}

/* A child, which the memory cgroup's limit leaves one MiB: a fault gets a page of 4 KiB. */
static void time_over_limit(const char *name, unsigned long reps)
{
	char text[24];
	pid_t pid;
	int status;

	must_write("/sys/fs/cgroup/cgroup.subtree_control", "+memory");
	must(!mkdir(GROUP, 0755) || errno == EEXIST, GROUP);
	must_write(GROUP "/memory.max", "16M");
	pid = kz_fork();
	if (!pid) {
		char *used = map_anonymous(LIMIT, KZ_HUGE, MADV_NOHUGEPAGE);

		must_write(GROUP "/cgroup.procs", "0");
		do {
			*used = 1;
			used += 4096;
			must(kz_read_file(GROUP "/memory.current", text, sizeof(text)) > 0, GROUP);
		} while (strtoul(text, NULL, 10) < LIMIT - KZ_MB);
		print_cost(name, time_path(run_thp_fault, reps, 1), reps);
		_exit(KZ_OK);
	}
	must(waitpid(pid, &status, 0) == pid, "waitpid");
	rmdir(GROUP);
	if (!WIFEXITED(status) || WEXITSTATUS(status))
		exit(KZ_BROKEN);
}

static void time_order(const char *name, void (*run)(void), unsigned long reps)
{
	struct cost with = time_path(run, reps, 1);

	print_cost(name, less(with, time_path(run_list0, reps, 1), 1), reps);
}

static void run_named(const char *name, unsigned long reps)
{
	if (!strcmp(name, "fault")) {
		print_cost(name, time_path(run_fault, reps, FAULT_PAGES), reps);
	} else if (!strcmp(name, "populate")) {
		print_cost(name, time_path(run_populate, reps, FAULT_PAGES), reps);
	} else if (!strcmp(name, "over_limit")) {
		time_over_limit(name, reps);
	} else if (!strcmp(name, "thp_fault")) {
		print_cost(name, time_path(run_thp_fault, reps, 1), reps);
	} else if (!strcmp(name, "pipe_deep")) {
		print_cost(name, time_path(run_pipe_deep, reps, PIPE_DEPTH), reps);
	} else if (!strcmp(name, "pipe_cached")) {
		print_cost(name, time_path(run_pipe_cached, reps, PIPE_DEPTH), reps);
	} else if (!strcmp(name, "alloc_free")) {
		struct cost with = time_path(run_pipe_deep, reps, 1);
		struct cost without = time_path(run_pipe_cached, reps, 1);

		print_cost(name, less(with, without, PIPE_DEPTH - PIPE_KEPT), reps);
	} else if (!strcmp(name, "buddy")) {
		struct cost with = time_path(run_buddy_deep, reps, 1);
		struct cost without = time_path(run_buddy_cached, reps, 1);

		print_cost(name, less(with, without, BUDDY_DEPTH - PIPE_KEPT), reps);
	} else if (!strcmp(name, "new_fault")) {
		time_fresh(name, run_new_fault, reps, FAULT_PAGES * 4096, FAULT_PAGES);
	} else if (!strcmp(name, "new_thp")) {
		time_fresh(name, run_new_thp, reps, KZ_HUGE, 1);
	} else if (!strcmp(name, "list0")) {
		print_cost(name, time_path(run_list0, reps, 1), reps);
	} else if (!strcmp(name, "list3")) {
		print_cost(name, time_path(run_list3, reps, 1), reps);
	} else if (!strcmp(name, "list9")) {
		print_cost(name, time_path(run_list9, reps, 1), reps);
	} else if (!strcmp(name, "order3")) {
		time_order(name, run_list3, reps);
	} else if (!strcmp(name, "order9")) {
		time_order(name, run_list9, reps);
	} else if (!strcmp(name, "fork")) {
		print_cost(name, time_path(run_fork, reps, 1), reps);
	} else if (!strcmp(name, "exec")) {
		print_cost(name, time_path(run_exec, reps, 1), reps);
	} else {
		kz_die(KZ_USAGE, "'%s': unknown path; see hotpath --help", name);
	}
}

static void *map_anonymous(size_t bytes, size_t align, int advice)
{
	char *raw = mmap(NULL, bytes + align, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char *mem;

	must(raw != MAP_FAILED, "mmap");
	mem = (char *)(((uintptr_t)raw + align - 1) & ~(align - 1));
	madvise(mem, bytes, advice);
	return mem;
}

int main(int argc, char **argv)
{
	static const char *const all[] = { "fault", "thp_fault", "pipe_deep", "pipe_cached",
					   "alloc_free", "buddy", "fork", "exec", "order3", "order9",
					   "populate" };
	unsigned long reps = 101;
	size_t i;
	const struct kz_option options[] = {
		{ "reps", .number = &reps, .min = 3, .max = 1000000 },
		{ 0 },
	};

	if (argc == 2 && !strcmp(argv[1], "--exit"))
		return KZ_OK;
	kz_options(argc, argv, "hotpath", usage, options);
	samples = calloc(reps, sizeof(*samples));
	must(samples != NULL, "calloc");
	/* Present before anything is timed. */
	memset(samples, 1, reps * sizeof(*samples));
	small = map_anonymous(FAULT_PAGES * 4096, KZ_HUGE, MADV_NOHUGEPAGE);
	huge = map_anonymous(KZ_HUGE, KZ_HUGE, MADV_HUGEPAGE);
	open_pipe(shallow, PIPE_DEPTH);
	open_pipe(deep, 256);
	if (optind == argc)
		for (i = 0; i < sizeof(all) / sizeof(all[0]); i++)
			run_named(all[i], reps);
	for (; optind < argc; optind++)
		run_named(argv[optind], reps);
	return KZ_OK;
}
