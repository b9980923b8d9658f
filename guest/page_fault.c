// SPDX-License-Identifier: GPL-2.0
/*
 * page_fault: maps memory, touches each page of it, and unmaps it, in a loop, in one process or in
 * several. Prints the pages per second and the cost of one whole mapping.
 */
#include "common.h"

#include <signal.h>
#include <sys/prctl.h>

#define PAGE 4096UL
#define MAX_TASKS 64UL

static const char usage[] =
"usage: page_fault [options]\n"
"Maps anonymous memory, writes a byte to each 4 KiB page, unmaps it, and begins again; prints one\n"
"JSON line. An iteration is a page touched; a cycle is a whole mapping, counted until it is touched.\n"
"  --tasks N        processes side by side (default 1)\n"
"  --size MB        mapping of each process (default 128)\n"
"  --pages KIND     thp    huge pages (default)\n"
"                   nothp  4 KiB pages\n"
"  --ms N           duration (default 1000)\n"
"  --pause-ms N     wait before the next mapping (default 0)\n"
"  --skip N         first cycles of each process, which do not count (default 0)\n"
"  --cycles N       go on until each process has counted N cycles (default 0)\n"
"  --help           this text\n"
"Exit: 0 done, 2 bad usage, 3 the machine cannot do it.\n";

struct job {
	unsigned long bytes;
	unsigned long skip, cycles;
	uint64_t ns;
	useconds_t pause_us;
	bool huge;
};

/* The results of a process, in memory that it shares with its parent. */
struct task {
	uint64_t iterations, wall_ns;
	uint64_t cycles, cycle_wall_ns, cycle_cpu_ns;
};

static uint64_t cpu_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts);
	return (uint64_t)ts.tv_sec * 1000000000ULL + (uint64_t)ts.tv_nsec;
}

static void work(const struct job *job, struct task *task)
{
	uint64_t began = kz_now_ns(), now = began;
	unsigned long round;

	for (round = 0; now - began < job->ns || task->cycles < job->cycles; round++) {
		uint64_t start = kz_now_ns(), cpu = cpu_ns();
		volatile unsigned char *mem = kz_map(job->bytes, 0);
		size_t done = 0;

		if (job->huge && madvise((void *)mem, job->bytes, MADV_HUGEPAGE))
			kz_die(KZ_BROKEN, "MADV_HUGEPAGE: %s; boot a kernel with THP, or use --pages nothp",
			       strerror(errno));
		/* The time may end before the mapping is touched: check it after each 2 MiB. */
		do {
			size_t end = done + KZ_HUGE < job->bytes ? done + KZ_HUGE : job->bytes;

			for (; done < end; done += PAGE)
				mem[done] = 1;
			now = kz_now_ns();
		} while (done < job->bytes &&
			 (now - began < job->ns || task->cycles < job->cycles));
		task->iterations += done / PAGE;
		if (done == job->bytes && round >= job->skip) {
			task->cycles++;
			task->cycle_wall_ns += now - start;
			task->cycle_cpu_ns += cpu_ns() - cpu;
		}
		munmap((void *)mem, job->bytes);
		if (job->pause_us)
			usleep(job->pause_us);
		now = kz_now_ns();
	}
	task->wall_ns = now - began;
}

int main(int argc, char **argv)
{
	static const char *const kinds[] = { "thp", "nothp", NULL };
	unsigned long tasks = 1, megabytes = 128, ms = 1000, pause_ms = 0, i;
	unsigned int kind = 0;
	struct job job = { 0 };
	struct task *task, sum = { 0 };
	struct kz_vmstat before, after;
	int ready[2], go[2];
	double per_second = 0;
	pid_t pids[MAX_TASKS];
	const struct kz_option options[] = {
		{ "tasks", .number = &tasks, .min = 1, .max = MAX_TASKS },
		{ "size", .number = &megabytes, .min = 1, .max = 1UL << 20 },
		{ "pages", .choice = &kind, .choices = kinds },
		{ "ms", .number = &ms, .min = 1, .max = 1000000 },
		{ "pause-ms", .number = &pause_ms, .max = 100000 },
		{ "skip", .number = &job.skip, .max = 1000000 },
		{ "cycles", .number = &job.cycles, .max = 1000000 },
		{ 0 },
	};

	kz_only_options(argc, argv, "page_fault", usage, options);
	job.bytes = megabytes * KZ_MB;
	job.huge = kind == 0;
	job.ns = ms * 1000000ULL;
	job.pause_us = (useconds_t)pause_ms * 1000;

	/* This covers all sizes and is inherited, so both kinds have the same loop without madvise(). */
	if (!job.huge && prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0))
		kz_fail("PR_SET_THP_DISABLE");
	task = kz_map(tasks * sizeof(*task), MAP_SHARED | MAP_ANONYMOUS);
	if (pipe2(ready, O_CLOEXEC) || pipe2(go, O_CLOEXEC))
		kz_fail("pipe");
	for (i = 0; i < tasks; i++) {
		char byte = 0;

		pids[i] = kz_fork();
		if (pids[i])
			continue;
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(go[1]);
		/* All begin at once: the parent closes the other end when each of them is ready. */
		if (write(ready[1], &byte, 1) != 1 || read(go[0], &byte, 1))
			_exit(KZ_BROKEN);
		work(&job, &task[i]);
		_exit(KZ_OK);
	}
	for (i = 0; i < tasks; i++) {
		char byte;

		if (read(ready[0], &byte, 1) != 1)
			kz_fail("cannot read from process %lu", i);
	}
	kz_vmstat_read(&before);
	close(go[1]);
	for (i = 0; i < tasks; i++) {
		int code = kz_wait_measured(pids[i], NULL);

		if (code)
			return code;
		sum.iterations += task[i].iterations;
		sum.cycles += task[i].cycles;
		sum.cycle_wall_ns += task[i].cycle_wall_ns;
		sum.cycle_cpu_ns += task[i].cycle_cpu_ns;
		per_second += (double)task[i].iterations * 1e9 / (double)task[i].wall_ns;
	}
	kz_vmstat_read(&after);
	printf("{\"tasks\": %lu, \"pages\": \"%s\", \"bytes\": %lu, \"iterations\": %" PRIu64
	       ", \"per_second\": %.1f, \"cycles\": %" PRIu64 ", \"cycle_wall_ns\": %" PRIu64
	       ", \"cycle_cpu_ns\": %" PRIu64 ", ",
	       tasks, job.huge ? "thp" : "nothp", job.bytes, sum.iterations, per_second, sum.cycles,
	       sum.cycle_wall_ns, sum.cycle_cpu_ns);
	kz_vmstat_print_delta(&before, &after);
	printf("}\n");
	return KZ_OK;
}
