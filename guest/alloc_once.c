// SPDX-License-Identifier: GPL-2.0
/*
 * alloc_once: allocates memory once, in a child process, and prints the cost.
 *
 * The child is measured from outside, from its exec to its exit, with the task-clock software
 * event, as `perf stat -e task-clock` measures a command.
 */
#include "common.h"

#include <dirent.h>
#include <linux/perf_event.h>
#include <sys/syscall.h>

enum mode { POPULATE, TOUCH_LINE, TOUCH_ALL, READ_ALL, SPARSE };

static const char *const mode_names[] = { "populate", "touch_line", "touch_all", "read_all", "sparse",
					  NULL };

static const char usage[] =
"usage: alloc_once [options]\n"
"Allocates memory once in a measured child process; one JSON line per repetition.\n"
"  --size MIB       amount in MiB (default 256)\n"
"  --mode MODE      populate    have the kernel populate the mapping, touch nothing (default)\n"
"                   touch_line  then write one byte in each 4 KiB page\n"
"                   touch_all   then write every byte\n"
"                   read_all    then read every byte\n"
"                   sparse      populate nothing, write one byte in each 2 MiB\n"
"  --pages KIND     system      the setting of the system (default)\n"
"                   thp         MADV_HUGEPAGE\n"
"                   nothp       MADV_NOHUGEPAGE\n"
"                   mthp=KB     only folios of KB kilobytes (sets and restores sysfs)\n"
"                   hugetlb     MAP_HUGETLB\n"
"                   shmem       shared memory\n"
"  --verify         before the first write, check that all bytes are zero; exit 1 if not\n"
"  --reps N         repetitions (default 1)\n"
"  --help           this text\n"
"Exit: 0 done, 1 memory was not zero, 2 bad usage, 3 the machine cannot do it.\n";

struct job {
	unsigned long bytes;
	enum mode mode;
	const char *pages;
	bool verify;
};

/* The job of the measured child. It ends the process. */
static void child_job(const struct job *job)
{
	int flags = MAP_PRIVATE | MAP_ANONYMOUS;
	unsigned char *mem;
	size_t i;

	if (!strcmp(job->pages, "hugetlb"))
		flags |= MAP_HUGETLB;
	if (!strcmp(job->pages, "shmem"))
		flags = MAP_SHARED | MAP_ANONYMOUS;
	mem = mmap(NULL, job->bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
	if (mem == MAP_FAILED)
		kz_fail("cannot map %lu MiB (%s)", job->bytes / KZ_MB, job->pages);
	/* A kernel without THP returns EINVAL; that is no error for nothp. */
	if (!strcmp(job->pages, "nothp"))
		madvise(mem, job->bytes, MADV_NOHUGEPAGE);
	else if (!strcmp(job->pages, "thp") || !strncmp(job->pages, "mthp=", 5))
		if (madvise(mem, job->bytes, MADV_HUGEPAGE))
			kz_die(KZ_BROKEN, "MADV_HUGEPAGE: %s; boot a kernel with THP, or use --pages nothp",
			       strerror(errno));
	if (job->mode != SPARSE && madvise(mem, job->bytes, MADV_POPULATE_WRITE))
		kz_fail("cannot populate %lu MiB", job->bytes / KZ_MB);
	if (job->verify) {
		size_t bad = kz_first_nonzero(mem, job->bytes);

		if (bad < job->bytes)
			kz_die(KZ_FAILED, "byte %zu of new memory is 0x%02x, not 0: another owner wrote it; see the kernel log (dmesg)",
			       bad, mem[bad]);
	}
	switch (job->mode) {
	case POPULATE:
		break;
	case TOUCH_LINE:
		for (i = 0; i < job->bytes; i += 4096)
			((volatile unsigned char *)mem)[i] = 1;
		break;
	case TOUCH_ALL:
		memset(mem, 0x5a, job->bytes);
		/* Keep the stores although their result is unused. */
		__asm__ volatile("" : : "r"(mem) : "memory");
		break;
	case READ_ALL:
		if (kz_first_nonzero(mem, job->bytes) < job->bytes)
			kz_die(KZ_FAILED, "new memory is not zero: another owner wrote it; see the kernel log (dmesg)");
		break;
	case SPARSE:
		for (i = 0; i < job->bytes; i += 2 * KZ_MB)
			((volatile unsigned char *)mem)[i] = 1;
		break;
	}
	munmap(mem, job->bytes);
	_exit(KZ_OK);
}

#define MTHP_DIR "/sys/kernel/mm/transparent_hugepage"

/* The word in brackets of a sysfs choice such as "always [madvise] never". */
static void chosen_word(const char *path, char *word, size_t size)
{
	char text[128], *open_bracket, *close_bracket;

	word[0] = '\0';
	if (kz_read_file(path, text, sizeof(text)) < 0)
		return;
	open_bracket = strchr(text, '[');
	close_bracket = open_bracket ? strchr(open_bracket, ']') : NULL;
	if (!close_bracket)
		return;
	*close_bracket = '\0';
	snprintf(word, size, "%s", open_bracket + 1);
}

/* Linux turns them off where memory is less than 512 MB. */
static void need_thp(void)
{
	char enabled[16];

	chosen_word(MTHP_DIR "/enabled", enabled, sizeof(enabled));
	if (!strcmp(enabled, "never"))
		kz_die(KZ_BROKEN, "huge pages are off: %s/enabled is never; write madvise to it", MTHP_DIR);
}

#define MAX_SIZES 32
static struct { char path[160]; char old[32]; } sizes[MAX_SIZES];
static int nr_sizes;

static void restore_sizes(void)
{
	while (nr_sizes > 0) {
		nr_sizes--;
		if (sizes[nr_sizes].old[0])
			kz_write_file(sizes[nr_sizes].path, sizes[nr_sizes].old);
	}
}

/* Allows folios of kb kilobytes alone, until the program ends. */
static void only_size(unsigned long kb)
{
	struct dirent *entry;
	bool found = false;
	DIR *dir = opendir(MTHP_DIR);

	if (!dir)
		kz_fail("cannot open " MTHP_DIR);
	atexit(restore_sizes);
	while ((entry = readdir(dir))) {
		unsigned long this_kb;
		int err;

		if (sscanf(entry->d_name, "hugepages-%lukB", &this_kb) != 1 ||
		    nr_sizes == MAX_SIZES)
			continue;
		snprintf(sizes[nr_sizes].path, sizeof(sizes[0].path),
			 MTHP_DIR "/hugepages-%lukB/enabled", this_kb);
		/* Some sizes serve shmem alone and have no such file. */
		if (access(sizes[nr_sizes].path, W_OK))
			continue;
		chosen_word(sizes[nr_sizes].path, sizes[nr_sizes].old, sizeof(sizes[0].old));
		err = kz_write_file(sizes[nr_sizes].path, this_kb == kb ? "always" : "never");
		nr_sizes++;
		if (err)
			kz_die(KZ_BROKEN, "cannot set %s: %s; %s", sizes[nr_sizes - 1].path,
			       strerror(-err), kz_help(-err));
		found |= this_kb == kb;
	}
	closedir(dir);
	if (!found)
		kz_die(KZ_USAGE, "--pages: mthp=%lu is no folio size of this kernel; see " MTHP_DIR, kb);
}

static int open_task_clock(pid_t pid)
{
	struct perf_event_attr attr = {
		.type = PERF_TYPE_SOFTWARE,
		.size = sizeof(attr),
		.config = PERF_COUNT_SW_TASK_CLOCK,
		.disabled = 1,
		.inherit = 1,
		.enable_on_exec = 1,
	};

	return (int)syscall(SYS_perf_event_open, &attr, pid, -1, -1, PERF_FLAG_FD_CLOEXEC);
}

/* One repetition: starts the child held back by a pipe, attaches the counter, lets it exec. */
static int measure(unsigned long rep, const struct job *job, char **worker_argv)
{
	struct kz_vmstat before, after;
	uint64_t start, wall, task_clock = 0;
	char task_clock_text[24] = "null";
	int gate[2], counter, code;
	struct rusage spent;
	pid_t pid;

	if (pipe2(gate, O_CLOEXEC))
		kz_fail("pipe");
	pid = kz_fork();
	if (!pid) {
		char go;

		if (read(gate[0], &go, 1) != 1)
			_exit(KZ_BROKEN);
		execv("/proc/self/exe", worker_argv);
		_exit(KZ_BROKEN);
	}
	counter = open_task_clock(pid);
	/* User-Mode Linux has no such counters: the other figures are still valid. */
	if (counter < 0 && errno != ENOSYS)
		kz_fail("perf_event_open(task-clock)");
	kz_vmstat_read(&before);
	start = kz_now_ns();
	if (write(gate[1], "g", 1) != 1)
		kz_fail("write");
	code = kz_wait_measured(pid, &spent);
	wall = kz_now_ns() - start;
	kz_vmstat_read(&after);
	if (counter >= 0) {
		if (read(counter, &task_clock, sizeof(task_clock)) != sizeof(task_clock))
			kz_fail("cannot read the task-clock counter");
		snprintf(task_clock_text, sizeof(task_clock_text), "%" PRIu64, task_clock);
		close(counter);
	}
	close(gate[0]);
	close(gate[1]);

	if (code)
		return code;
	printf("{\"rep\": %lu, \"mode\": \"%s\", \"pages\": \"%s\", \"bytes\": %lu, "
	       "\"task_clock_ns\": %s, \"wall_ns\": %" PRIu64 ", "
	       "\"user_us\": %ld, \"system_us\": %ld, \"minor_faults\": %ld, ",
	       rep, mode_names[job->mode], job->pages, job->bytes, task_clock_text, wall,
	       spent.ru_utime.tv_sec * 1000000L + spent.ru_utime.tv_usec,
	       spent.ru_stime.tv_sec * 1000000L + spent.ru_stime.tv_usec, spent.ru_minflt);
	kz_vmstat_print_delta(&before, &after);
	printf("}\n");
	fflush(stdout);
	return 0;
}

int main(int argc, char **argv)
{
	struct job job = { .mode = POPULATE, .pages = "system" };
	static const char *const kinds[] = { "system", "thp", "nothp", "hugetlb", "shmem", NULL };
	unsigned long size = 256, reps = 1, rep, kb = 0;
	unsigned int kind = 0;
	bool worker = false;
	char **worker_argv;
	const struct kz_option options[] = {
		{ "size", .number = &size, .min = 1, .max = 1UL << 20 },
		{ "mode", .choice = &job.mode, .choices = mode_names },
		{ "pages", .text = &job.pages },
		{ "verify", .flag = &job.verify },
		{ "reps", .number = &reps, .min = 1, .max = 1000000 },
		{ "worker", .flag = &worker },
		{ 0 },
	};

	kz_only_options(argc, argv, "alloc_once", usage, options);
	job.bytes = size * KZ_MB;
	if (!strncmp(job.pages, "mthp=", 5))
		kb = kz_number("pages mthp", job.pages + 5, 8, 1UL << 20);
	else
		kz_set_option(&(struct kz_option){ "pages", .choice = &kind, .choices = kinds }, job.pages);
	if (worker)
		child_job(&job);

	if (kb)
		only_size(kb);
	worker_argv = kz_worker_argv(argc, argv);
	if (!strcmp(job.pages, "thp"))
		need_thp();
	for (rep = 0; rep < reps; rep++) {
		int code = measure(rep, &job, worker_argv);

		if (code)
			return code;
	}
	return KZ_OK;
}
