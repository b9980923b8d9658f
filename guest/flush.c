// SPDX-License-Identifier: GPL-2.0
/*
 * flush: writes a value to the attribute flush of page_reporting and prints the result. It can receive
 * a signal during the write; a shell cannot.
 */
#include "common.h"

#include <signal.h>
#include <sys/time.h>

#define FLUSH "/sys/kernel/mm/page_reporting/flush"

static const char usage[] =
"usage: flush [options] [VALUE]\n"
"Writes VALUE (default 0: everything) to " FLUSH ";\n"
"prints one JSON line with the error (null if none) and what was reported meanwhile.\n"
"  --signal-after US  receive a signal each time this many microseconds have passed\n"
"  --help             this text\n"
"Exit: 0 the write was tried; 2 bad usage; 3 there is no such parameter.\n";

static void on_signal(int number KZ_MAYBE_UNUSED) { }

int main(int argc, char **argv)
{
	static struct kz_vmstat before, after;
	unsigned long after_us = 0;
	const char *value = "0";
	int fd, error = 0;
	uint64_t start, wall;
	const struct kz_option options[] = {
		{ "signal-after", .number = &after_us, .min = 1, .max = 999999 },
		{ 0 },
	};

	kz_options(argc, argv, "flush", usage, options);
	if (optind < argc)
		value = argv[optind++];
	if (optind < argc)
		kz_die(KZ_USAGE, "'%s': unexpected argument, there is one value; see flush --help", argv[optind]);
	fd = open(FLUSH, O_WRONLY | O_CLOEXEC);
	if (fd < 0)
		kz_fail("cannot open " FLUSH);
	kz_vmstat_read(&before);
	if (after_us) {
		/* No SA_RESTART: the write must return. */
		struct sigaction action = { .sa_handler = on_signal };
		struct timeval us = { .tv_usec = (suseconds_t)after_us };
		struct itimerval timer = { .it_value = us, .it_interval = us };

		sigaction(SIGALRM, &action, NULL);
		setitimer(ITIMER_REAL, &timer, NULL);
	}
	start = kz_now_ns();
	if (write(fd, value, strlen(value)) < 0)
		error = errno;
	wall = kz_now_ns() - start;
	if (after_us)
		setitimer(ITIMER_REAL, &(struct itimerval){ 0 }, NULL);
	kz_vmstat_read(&after);
	printf("{\"error\": ");
	if (error)
		printf("\"%s\"", strerrorname_np(error));
	else
		printf("null");
	printf(", \"wall_ns\": %" PRIu64 ", ", wall);
	kz_vmstat_print_delta(&before, &after);
	printf("}\n");
	return KZ_OK;
}
