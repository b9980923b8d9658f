// SPDX-License-Identifier: GPL-2.0
/*
 * flush: writes a value to page_reporting's flush parameter and says what came of it; can have a
 * signal come in meanwhile, which a shell cannot.
 */
#include "common.h"

#include <getopt.h>
#include <signal.h>
#include <sys/time.h>

#define FLUSH "/sys/module/page_reporting/parameters/flush"

static void usage(FILE *out)
{
	fprintf(out,
"usage: flush [options] [VALUE]\n"
"Writes VALUE (default 0: everything) to " FLUSH ";\n"
"prints one JSON line with the error (null if none) and what was reported meanwhile.\n"
"  --signal-after US  have a signal come in after so many microseconds\n"
"  --help             this text\n"
"Exit: 0 the write was tried, whatever its result; 2 bad usage; 3 there is no such parameter.\n");
}

static void on_signal(int number KZ_MAYBE_UNUSED) { }

static const char *error_name(int error)
{
	switch (error) {
	case EINTR:
		return "EINTR";
	case EINVAL:
		return "EINVAL";
	case ENODEV:
		return "ENODEV";
	case ERANGE:
		return "ERANGE";
	case EACCES:
		return "EACCES";
	case EPERM:
		return "EPERM";
	}
	return strerror(error);
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{ "signal-after", required_argument, NULL, 's' },
		{ "help", no_argument, NULL, 'h' },
		{ NULL, 0, NULL, 0 },
	};
	static struct kz_vmstat before, after;
	unsigned long after_us = 0;
	const char *value = "0";
	int opt, fd, error = 0;
	uint64_t start, wall;

	kz_program = "flush";
	while ((opt = getopt_long(argc, argv, "+", options, NULL)) != -1) {
		switch (opt) {
		case 's':
			after_us = kz_number("--signal-after", optarg, 1, 999999);
			break;
		case 'h':
			usage(stdout);
			return KZ_OK;
		default:
			usage(stderr);
			return KZ_USAGE;
		}
	}
	if (optind < argc)
		value = argv[optind++];
	if (optind < argc)
		kz_die(KZ_USAGE, "unexpected argument '%s'; see --help", argv[optind]);
	fd = open(FLUSH, O_WRONLY | O_CLOEXEC);
	if (fd < 0)
		kz_die(KZ_BROKEN, "cannot open " FLUSH ": %s", strerror(errno));
	if (after_us) {
		/* No SA_RESTART: the write is to come back. */
		struct sigaction action = { .sa_handler = on_signal };
		struct itimerval timer = { .it_value = { .tv_usec = (suseconds_t)after_us } };

		sigaction(SIGALRM, &action, NULL);
		setitimer(ITIMER_REAL, &timer, NULL);
	}
	kz_vmstat_read(&before);
	start = kz_now_ns();
	if (write(fd, value, strlen(value)) < 0)
		error = errno;
	wall = kz_now_ns() - start;
	kz_vmstat_read(&after);
	printf("{\"error\": ");
	if (error)
		printf("\"%s\"", error_name(error));
	else
		printf("null");
	printf(", \"wall_ns\": %" PRIu64 ", ", wall);
	kz_vmstat_print_delta(&before, &after);
	printf("}\n");
	return KZ_OK;
}
