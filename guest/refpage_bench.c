// SPDX-License-Identifier: GPL-2.0
/*
 * refpage_bench: measures the cost of memory that starts with a pattern.
 *
 * Each repetition is a child process, measured from its exec to its exit: it
 * repeatedly maps a region that starts with the pattern, writes to the first byte of some of its pages,
 * and unmaps it.
 */
#include "common.h"

#include <sys/prctl.h>
#include <sys/syscall.h>

#ifndef __NR_refpage_create
#define __NR_refpage_create 473
#endif

#define PAGE 4096UL

enum method { MEMSET, REFPAGE };

static const char *const method_names[] = { "memset", "refpage", NULL };

static const char usage[] =
"usage: refpage_bench [options]\n"
"Maps memory that starts with a pattern, in a measured child process; one JSON line per repetition.\n"
"  --method METHOD  memset   anonymous memory, written with memset() (default)\n"
"                   refpage  a private mapping from refpage_create()\n"
"  --map BYTES      size of the mapping (default 4096000)\n"
"  --touch BYTES    the part that is used: a byte is written in each page (default 4096)\n"
"  --byte BYTE      the byte of the pattern (default 0xaa)\n"
"  --loops N        mappings (default 1000)\n"
"  --reps N         repetitions (default 1)\n"
"  --nothp          no huge pages for the child\n"
"  --check          read the whole mapping before it is used; exit 1 if it does not hold the pattern\n"
"  --help           this text\n"
"Exit: 0 done, 1 memory did not hold the pattern, 2 bad usage, 3 the machine cannot do it.\n";

struct job {
	enum method method;
	unsigned long map, touch, loops, byte;
	bool nothp, check;
	unsigned char *pattern;	/* one page */
	int fd;
};

static void set_up(struct job *job)
{
	job->pattern = aligned_alloc(PAGE, PAGE);
	if (!job->pattern)
		kz_fail("cannot allocate a page");
	memset(job->pattern, (int)job->byte, PAGE);
	if (job->method == REFPAGE)
		job->fd = (int)syscall(__NR_refpage_create, job->pattern, PAGE, 0);
	if (job->method == REFPAGE && job->fd < 0)
		kz_fail("refpage_create");
}

static void one_loop(const struct job *job)
{
	const bool anon = job->method == MEMSET;
	unsigned char *mem;
	unsigned long i;

	mem = mmap(NULL, job->map, PROT_READ | PROT_WRITE,
		   MAP_PRIVATE | (anon ? MAP_ANONYMOUS : 0), job->fd, 0);
	if (mem == MAP_FAILED)
		kz_fail("cannot map %lu bytes", job->map);
	if (job->method == MEMSET)
		memset(mem, (int)job->byte, job->map);
	if (job->check)
		for (i = 0; i < job->map; i += PAGE)
			if (memcmp(mem + i, job->pattern, PAGE))
				kz_die(KZ_FAILED, "page %lu does not hold the pattern: the kernel lost it; see the kernel log (dmesg)", i / PAGE);
	for (i = 0; i < job->touch; i += PAGE) {
		((volatile unsigned char *)mem)[i] = 0;
		/* The rest of the page has the pattern still. */
		if (job->check && memcmp(mem + i + 1, job->pattern + 1, PAGE - 1))
			kz_die(KZ_FAILED, "page %lu lost the pattern after a write; see the kernel log (dmesg)", i / PAGE);
	}
	if (munmap(mem, job->map))
		kz_fail("munmap");
}

/* The job of the measured child. It ends the process. */
static void child_job(struct job *job)
{
	unsigned long loop;

	if (job->nothp)
		prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
	set_up(job);
	for (loop = 0; loop < job->loops; loop++)
		one_loop(job);
	_exit(KZ_OK);
}

static int measure(unsigned long rep, const struct job *job, char **worker_argv)
{
	struct kz_vmstat before, after;
	uint64_t start, wall;
	struct rusage spent;
	int code;
	pid_t pid;

	fflush(stdout);
	kz_vmstat_read(&before);
	start = kz_now_ns();
	pid = vfork();
	if (pid < 0)
		kz_fail("vfork");
	if (!pid) {
		execv("/proc/self/exe", worker_argv);
		_exit(KZ_BROKEN);
	}
	code = kz_wait_measured(pid, &spent);
	wall = kz_now_ns() - start;
	kz_vmstat_read(&after);
	if (code)
		return code;
	printf("{\"rep\": %lu, \"method\": \"%s\", \"map\": %lu, \"touch\": %lu, \"loops\": %lu, "
	       "\"nothp\": %s, \"wall_ns\": %" PRIu64 ", \"user_us\": %ld, \"system_us\": %ld, "
	       "\"max_rss_kb\": %ld, \"minor_faults\": %ld, ",
	       rep, method_names[job->method], job->map, job->touch, job->loops,
	       job->nothp ? "true" : "false", wall,
	       spent.ru_utime.tv_sec * 1000000L + spent.ru_utime.tv_usec,
	       spent.ru_stime.tv_sec * 1000000L + spent.ru_stime.tv_usec, spent.ru_maxrss,
	       spent.ru_minflt);
	kz_vmstat_print_delta(&before, &after);
	printf("}\n");
	fflush(stdout);
	return 0;
}

int main(int argc, char **argv)
{
	struct job job = { .map = 4096000, .touch = PAGE, .loops = 1000, .byte = 0xaa,
			   .fd = -1 };
	unsigned long reps = 1, rep;
	char **worker_argv;
	bool worker = false;
	int error;
	const struct kz_option options[] = {
		{ "method", .choice = &job.method, .choices = method_names },
		{ "map", .number = &job.map, .min = PAGE, .max = SIZE_MAX >> 1 },
		{ "touch", .number = &job.touch, .max = SIZE_MAX >> 1 },
		{ "byte", .number = &job.byte, .max = 255 },
		{ "loops", .number = &job.loops, .min = 1, .max = 1000000000 },
		{ "reps", .number = &reps, .min = 1, .max = 1000000 },
		{ "nothp", .flag = &job.nothp },
		{ "check", .flag = &job.check },
		{ "worker", .flag = &worker },
		{ 0 },
	};

	kz_only_options(argc, argv, "refpage_bench", usage, options);
	if (job.touch > job.map)
		kz_die(KZ_USAGE, "--touch: %lu is more than the %lu bytes of --map; see refpage_bench --help",
		       job.touch, job.map);
	if (worker)
		child_job(&job);

	worker_argv = kz_worker_argv(argc, argv);
	for (rep = 0; rep < reps; rep++) {
		error = measure(rep, &job, worker_argv);
		if (error)
			return error;
	}
	return KZ_OK;
}
