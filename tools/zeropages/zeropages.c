// SPDX-License-Identifier: GPL-2.0
/*
 * zeropages: reports whether this kernel tracks known-zero memory, how much of it there is, which
 * source it has, and why a source is off.
 *
 * It runs on any Linux, without privileges. Every figure comes from /proc and /sys. A figure that
 * the kernel does not provide is unknown (?, null, or left out), never 0.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#define VERSION "1.0" /* of the package: control */
#define MAX_ZONES 256
#define MAX_ORDERS 32
#define MAX_NODES 64
#define MAX_POOLS 8
#define REPORTING "/sys/module/page_reporting/parameters"
#define PREZERO "/sys/kernel/mm/zero_page"
#define POOLS "/sys/kernel/mm/hugepages"
#define VIRTIO "/sys/bus/virtio/devices"

enum { OK = 0, NOT_WORKING = 1, USAGE = 2, CANNOT_TELL = 3 };

enum source { REPORTED, FREED, INFLATED, PREZEROED, NR_SOURCES };

static const char *const source_names[] = { "reported", "freed", "inflated", "prezeroed" };

/* The lines of /proc/vmstat that are read. */
enum counter {
	SET_REPORTED, SET_FREED, SET_PREZEROED, SKIP, LOST, BAD, CLEARED, BALLOON,
	PZ_USED, PZ_REPORTED, PZ_TAKEN, PZ_WAITED, NR_COUNTERS
};

static const char *const counter_names[] = {
	"pgzeroed_set_reported", "pgzeroed_set_freed", "pgzeroed_set_prezeroed",
	"pgzeroed_skip", "pgzeroed_lost", "pgzeroed_bad", "pgzeroed_cleared", "nr_balloon_pages",
	"pgprezero_used", "pgprezero_reported", "pgprezero_taken", "pgprezero_waited",
};

/* The counter of each source; deflated pages are among the freed ones. */
static const int set_of[] = { SET_REPORTED, SET_FREED, -1, SET_PREZEROED };

/* A figure, and whether the kernel provides it. */
struct value {
	uint64_t n;
	bool known;
};

/* Free memory of a zone, a node or the machine, in pages. The kernel counts zeros for the machine. */
enum column { FREE, CPU_LISTS, KNOWN_ZERO, DIRTY, NR_COLUMNS };

static const struct { const char *title, *json, *metric; } columns[] = {
	{ "free", "free_bytes", "free" },
	{ "CPU lists", "cpu_list_bytes", "cpu_list" },
	{ "known zero", "known_zero_bytes", "known_zero" },
	{ "dirty", "dirty_bytes", "dirty" },
};

/* Files with one number each, and their names in JSON. */
struct file {
	const char *file, *json;
};

enum { TOTAL, FREE_PAGES, RESERVED, SURPLUS, NR_POOL };

static const struct file pool_files[] = {
	{ "nr_hugepages", "total" }, { "free_hugepages", "free" },
	{ "resv_hugepages", "reserved" }, { "surplus_hugepages", "surplus" },
};

struct zone {
	int node, nr_orders;
	char name[16];
	bool present;
	struct value pages[NR_COLUMNS];
	uint64_t blocks[MAX_ORDERS];
};

struct thread {
	int node;
	long pid;
	char state;
};

struct snapshot {
	uint64_t ns;
	struct value counter[NR_COUNTERS];
	bool series;		/* the pgzeroed_ counters exist */
	int nr_zones, nr_nodes, nr_threads, nr_pools;
	struct zone zones[MAX_ZONES], nodes[MAX_NODES], all;
	struct value prezero_on, cpu_ms;
	struct thread threads[MAX_NODES];
	struct { unsigned long size; struct value values[NR_POOL]; } pools[MAX_POOLS];
	struct {
		char device[64];	/* empty: there is none */
		bool running, driver;
		char features[192];
		unsigned long status;
	} balloon;
	char test_reporter[32];	/* the mode of the test reporter; empty: off or absent */
	bool on[NR_SOURCES];
	char why[NR_SOURCES][320];	/* why a source is off */
};

/* Facts from the kernel log; later looks read on where the last one ended. */
static struct {
	int fd;
	bool readable, whole, seen, init_on_free;
	char not_tracking[160], no_reported[160], no_inflated[160], no_prezero[160];
} kernel_log = { .fd = -1 };

static const char *root = "";
static uint64_t page_size;
static FILE *out;
/* The present look, and the one before it, or NULL. */
static struct snapshot *now, *before;

static const char usage[] =
"usage: zeropages [options]\n"
"Shows free, known-zero and dirty memory by node and zone, the sources and their state,\n"
"how much zeroing was skipped, and in one sentence whether it works.\n"
"  --once           show it once, as totals since boot; with --interval also as rates\n"
"  --interval S     seconds between two looks, 1 to 3600 (default 2)\n"
"  --count N        end after N looks\n"
"  --json           one JSON object a line\n"
"  --metrics        once, in Prometheus text format (node-exporter's textfile collector)\n"
"  --check          print the sentence only and exit with the answer, for monitoring\n"
"  --root DIR       read DIR/proc, DIR/sys and DIR/dev/kmsg instead of the machine's\n"
"  --version        the version\n"
"  --help           this text\n"
"Exit: 0 shown, or --check: it works; 1 --check: it does not work; 2 bad usage;\n"
"      3 /proc cannot be read, or --check: too early to tell.\n";

static void die(int code, const char *fmt, ...) __attribute__((noreturn, format(printf, 2, 3)));

/* The message has three parts: what failed with the value, why, the command that helps. */
static void die(int code, const char *fmt, ...)
{
	va_list ap;

	fflush(stdout);
	fputs("zeropages: ", stderr);
	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fputc('\n', stderr);
	exit(code);
}

/* Reading */

static const char *at(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* A path below the root; valid until the fourth call after this one. */
static const char *at(const char *fmt, ...)
{
	static char paths[4][PATH_MAX];
	static unsigned int turn;
	char *path = paths[turn++ % 4];
	int used = snprintf(path, PATH_MAX, "%s", root);
	va_list ap;

	va_start(ap, fmt);
	if (used >= 0 && used < PATH_MAX)
		vsnprintf(path + used, (size_t)(PATH_MAX - used), fmt, ap);
	va_end(ap);
	return path;
}

/* Reads a small file as a string without its last newlines; false if it is empty or unreadable. */
static bool read_text(const char *path, char *text, size_t size)
{
	FILE *f = fopen(path, "re");
	size_t used = 0;

	if (f) {
		used = fread(text, 1, size - 1, f);
		fclose(f);
	}
	while (used && text[used - 1] == '\n')
		used--;
	text[used] = '\0';
	return used > 0;
}

static struct value read_number(const char *path)
{
	char text[64], *end = text;
	struct value value = { 0 };

	if (read_text(path, text, sizeof(text)))
		value.n = strtoull(text, &end, 0);
	value.known = end != text;
	return value;
}

static void read_numbers(const char *folder, const struct file *files, struct value *values)
{
	char path[PATH_MAX + 32];
	int i;

	for (i = 0; i < 4; i++) {
		snprintf(path, sizeof(path), "%s/%s", folder, files[i].file);
		values[i] = read_number(path);
	}
}

/* Whether a boolean kernel parameter is on, as kstrtobool() reads it; the last one counts. */
static bool on_command_line(const char *name)
{
	static char text[8192];
	char *word, *rest;
	size_t len = strlen(name);
	bool on = false;

	if (!read_text(at("/proc/cmdline"), text, sizeof(text)))
		return false;
	for (word = strtok_r(text, " \n", &rest); word; word = strtok_r(NULL, " \n", &rest)) {
		if (strncmp(word, name, len) || word[len] != '=')
			continue;
		word += len + 1;
		on = *word == '1' || strchr("yYtT", *word) ||
		     (tolower(*word) == 'o' && tolower(word[1]) == 'n');
	}
	return on;
}

static void log_line(const char *line)
{
	const struct { const char *sign; char *to; } reasons[] = {
		{ "page_zeroed: not tracking known-zero pages: ", kernel_log.not_tracking },
		{ "not using DEVICE_INIT_REPORTED: ", kernel_log.no_reported },
		{ "not using DEVICE_INIT_ON_INFLATE: ", kernel_log.no_inflated },
		{ "prezero: free memory cannot be zeroed: ", kernel_log.no_prezero },
	};
	const char *found;
	size_t i;

	if (!kernel_log.seen) {
		/* "PRIORITY,SEQUENCE,…": record 0 is the first that was ever written. */
		found = strchr(line, ',');
		kernel_log.whole = found && !strncmp(found, ",0,", 3);
		kernel_log.seen = true;
	}
	for (i = 0; i < sizeof(reasons) / sizeof(reasons[0]); i++) {
		found = strstr(line, reasons[i].sign);
		if (found)
			snprintf(reasons[i].to, sizeof(kernel_log.not_tracking), "%s",
				 found + strlen(reasons[i].sign));
	}
	if (strstr(line, "mem auto-init: ") && strstr(line, "heap free:on"))
		kernel_log.init_on_free = true;
}

static void read_log(void)
{
	static char text[65536];
	char *line, *rest;
	ssize_t got;

	if (kernel_log.fd < 0)
		kernel_log.fd = open(at("/dev/kmsg"), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	if (kernel_log.fd < 0)
		return;
	/* Each read returns one record, or a part of a plain file (--root). */
	for (;;) {
		got = read(kernel_log.fd, text, sizeof(text) - 1);
		if (got < 0 && (errno == EPIPE || errno == EINTR))
			continue;
		if (got <= 0)
			break;
		kernel_log.readable = true;
		text[got] = '\0';
		for (line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest))
			log_line(line);
	}
	if (got < 0 && errno != EAGAIN)
		kernel_log.readable = false;
}

static FILE *must_open(const char *path)
{
	FILE *f = fopen(path, "re");

	if (!f)
		die(CANNOT_TELL, "cannot read %s: %s; mount -t proc proc /proc", path, strerror(errno));
	return f;
}

static void read_vmstat(void)
{
	char name[64];
	uint64_t value;
	int i;
	FILE *f = must_open(at("/proc/vmstat"));

	while (fscanf(f, "%63s %" SCNu64, name, &value) == 2)
		for (i = 0; i < NR_COUNTERS; i++)
			if (!strcmp(name, counter_names[i]))
				now->counter[i] = (struct value){ value, true };
	fclose(f);
	now->series = now->counter[CLEARED].known;
}

static void read_zones(void)
{
	char line[256], name[16];
	struct zone *zone = NULL;
	uint64_t n;
	int node;
	FILE *f = must_open(at("/proc/zoneinfo"));

	while (fgets(line, sizeof(line), f)) {
		if (sscanf(line, "Node %d, zone %15s", &node, name) == 2) {
			/* The place of a zone without memory is used again. */
			if (!zone || zone->present)
				zone = &now->zones[now->nr_zones++];
			if (now->nr_zones == MAX_ZONES)
				break;
			*zone = (struct zone){ .node = node };
			memcpy(zone->name, name, sizeof(name));
		} else if (!zone) {
			continue;
		} else if (sscanf(line, " present %" SCNu64, &n) == 1) {
			zone->present = n;
		} else if (sscanf(line, " nr_free_pages %" SCNu64, &n) == 1 ||
			   sscanf(line, " pages free %" SCNu64, &n) == 1) {
			zone->pages[FREE].n = n;
		} else if (sscanf(line, " count: %" SCNu64, &n) == 1) {
			zone->pages[CPU_LISTS].n += n;
		}
	}
	fclose(f);
	if (zone && !zone->present)
		now->nr_zones--;
}

/* Reads numbers of free blocks by order. */
static void read_orders(void)
{
	char line[512], name[16];
	int node, used, i;
	FILE *f = fopen(at("/proc/buddyinfo"), "re");

	while (f && fgets(line, sizeof(line), f)) {
		struct zone *zone = NULL;
		char *from, *end;

		if (sscanf(line, "Node %d, zone %15s%n", &node, name, &used) != 2)
			continue;
		for (i = 0; i < now->nr_zones; i++)
			if (now->zones[i].node == node && !strcmp(now->zones[i].name, name))
				zone = &now->zones[i];
		if (!zone)
			continue;
		for (i = 0, from = line + used; i < MAX_ORDERS; i++, from = end) {
			zone->blocks[i] = strtoull(from, &end, 10);
			if (end == from)
				break;
		}
		zone->nr_orders = i;
	}
	if (f)
		fclose(f);
}

static void add_pages(struct zone *to, const struct zone *zone)
{
	int c;

	for (c = FREE; c <= CPU_LISTS; c++) {
		to->pages[c].n += zone->pages[c].n;
		to->pages[c].known = true;
	}
}

static uint64_t sum_set(void)
{
	return now->counter[SET_REPORTED].n + now->counter[SET_FREED].n + now->counter[SET_PREZEROED].n;
}

static void add_zones(void)
{
	const uint64_t gone = now->counter[SKIP].n + now->counter[LOST].n;
	struct value *all = now->all.pages;
	const struct zone none = { 0 };
	int i, j;

	for (i = 0; i < now->nr_zones; i++) {
		struct zone *zone = &now->zones[i];

		add_pages(zone, &none);
		add_pages(&now->all, zone);
		for (j = 0; j < now->nr_nodes && now->nodes[j].node != zone->node; j++)
			;
		if (j == MAX_NODES)
			continue;
		if (j == now->nr_nodes)
			now->nodes[now->nr_nodes++].node = zone->node;
		add_pages(&now->nodes[j], zone);
	}
	/* The kernel changes these figures while they are read. */
	all[KNOWN_ZERO] = (struct value){ sum_set() > gone ? sum_set() - gone : 0, now->series };
	all[DIRTY] = (struct value){ all[FREE].n + all[CPU_LISTS].n, now->series };
	all[DIRTY].n -= all[KNOWN_ZERO].n < all[DIRTY].n ? all[KNOWN_ZERO].n : all[DIRTY].n;
}

/* Calls @fn for each entry of a folder; a folder that does not exist has none. */
static void for_each(const char *path, void (*fn)(const char *name))
{
	DIR *dir = opendir(at("%s", path));
	struct dirent *entry;

	while (dir && (entry = readdir(dir)))
		fn(entry->d_name);
	if (dir)
		closedir(dir);
}

static void read_thread(const char *name)
{
	struct thread *thread = &now->threads[now->nr_threads];
	uint64_t user, system;
	char text[512], *end;

	if (!isdigit((unsigned char)*name) || now->nr_threads == MAX_NODES ||
	    !read_text(at("/proc/%s/stat", name), text, sizeof(text)))
		return;
	end = strrchr(text, ')');
	/* Any process may take the name; only a kernel thread has kthreadd (2) as its parent. */
	if (!end || sscanf(text, "%ld (kzeropaged%d)", &thread->pid, &thread->node) != 2 ||
	    strncmp(end + 1, " ", 1) || strncmp(end + 3, " 2 ", 3))
		return;
	thread->state = end[2];
	if (sscanf(end + 4, "%*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %" SCNu64 " %" SCNu64, &user, &system) == 2) {
		now->cpu_ms.n += (user + system) * 1000 / (uint64_t)sysconf(_SC_CLK_TCK);
		now->cpu_ms.known = true;
	}
	now->nr_threads++;
}

static void read_pool(const char *name)
{
	const int i = now->nr_pools;

	if (i == MAX_POOLS || sscanf(name, "hugepages-%lukB", &now->pools[i].size) != 1)
		return;
	now->pools[i].size *= 1024;
	read_numbers(at(POOLS "/%s", name), pool_files, now->pools[i].values);
	now->nr_pools++;
}

static void read_balloon(const char *name)
{
	if (now->balloon.driver || *name == '.' || read_number(at(VIRTIO "/%s/device", name)).n != 5)
		return;
	snprintf(now->balloon.device, sizeof(now->balloon.device), "%.60s", name);
	now->balloon.driver = !access(at(VIRTIO "/%s/driver", name), F_OK);
	read_text(at(VIRTIO "/%s/features", name), now->balloon.features, sizeof(now->balloon.features));
	now->balloon.status = read_number(at(VIRTIO "/%s/status", name)).n;
	/* DRIVER_OK, without FAILED and DEVICE_NEEDS_RESET. */
	now->balloon.running = now->balloon.driver && (now->balloon.status & 0xc4) == 4;
}

/* Why a source is off */

/* The setting that excludes tracking, or NULL. */
static const char *obstacle(void)
{
	if (*kernel_log.not_tracking)
		return kernel_log.not_tracking;
	if (on_command_line("page_poison"))
		return "free pages are poisoned (page_poison=1)";
	if (on_command_line("init_on_free") || kernel_log.init_on_free)
		return "free pages are zero anyway (init_on_free=1)";
	return NULL;
}

static void because(enum source source, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

static void because(enum source source, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(now->why[source], sizeof(now->why[source]), fmt, ap);
	va_end(ap);
}

static bool has_feature(unsigned int bit)
{
	return strlen(now->balloon.features) > bit && now->balloon.features[bit] == '1';
}

/* Explains a source that needs feature @bit of the device; @reason is the kernel log's, if any. */
static void explain_device(enum source source, unsigned int bit, const char *parameter,
			   const char *reason, const char *offer)
{
	const char *device = now->balloon.device, *general = obstacle();
	char refused[8];

	now->on[source] = now->balloon.running && has_feature(bit) && !has_feature(33);
	if (now->on[source])
		return;
	if (!*device)
		because(source, "there is no virtio balloon");
	else if (!now->balloon.driver)
		because(source, "%s, a balloon, has no driver (CONFIG_VIRTIO_BALLOON)", device);
	else if (!now->balloon.running)
		because(source, "the driver of %s is not running (status 0x%lx)", device,
			now->balloon.status);
	else if (has_feature(bit))
		because(source, "%s uses the DMA API (VIRTIO_F_ACCESS_PLATFORM)", device);
	else if (read_text(at("/sys/module/virtio_balloon/parameters/%s", parameter), refused,
			   sizeof(refused)) && strchr("N0", *refused))
		because(source, "refused by the parameter virtio_balloon.%s", parameter);
	else if (bit == 6 && !has_feature(5))
		because(source, "free pages are not reported: %s",
			access(at(REPORTING), F_OK) ? "the kernel has no CONFIG_PAGE_REPORTING" :
			"the device does not offer it (free-page-reporting=on in QEMU)");
	else if (*reason || general)
		because(source, "%s", *reason ? reason : general);
	else if (!has_feature(32))
		because(source, "%s is a legacy device", device);
	else if (kernel_log.readable && kernel_log.whole)
		because(source, "the device does not offer bit %u (%s)", bit, offer);
	else
		because(source, "bit %u is not negotiated: the device does not offer it (%s), or the driver declined it; the kernel log, which has the reason, cannot be read",
			bit, offer);
}

static void explain(void)
{
	const char *general = obstacle();

	if (*now->test_reporter)
		now->on[REPORTED] = true;
	else
		explain_device(REPORTED, 6, "device_init_reported", kernel_log.no_reported,
			       "QEMU with the series does, with free-page-reporting=on");
	explain_device(INFLATED, 7, "device_init_on_inflate", kernel_log.no_inflated,
		       "QEMU with the series does, with device-init-on-inflate=on");
	now->on[PREZEROED] = now->prezero_on.n;
	if (!now->prezero_on.known)
		because(PREZEROED, "the kernel has no CONFIG_PREZERO_PAGE");
	else if (!now->on[PREZEROED])
		because(PREZEROED, "%s", *kernel_log.no_prezero ? kernel_log.no_prezero :
			general ? general : "not turned on (echo 1 > " PREZERO "/enabled)");
	/* A page that is freed unused stays known zero through the source that it had before. */
	now->on[FREED] = now->on[REPORTED] || now->on[INFLATED] || now->on[PREZEROED];
	if (!now->on[FREED])
		because(FREED, "no other source is on");
}

static void look(void)
{
	struct timespec ts;
	char mode[8];

	memset(now, 0, sizeof(*now));
	read_log();
	clock_gettime(CLOCK_MONOTONIC, &ts);
	now->ns = (uint64_t)ts.tv_sec * 1000000000ULL + (uint64_t)ts.tv_nsec;
	read_vmstat();
	read_zones();
	read_orders();
	add_zones();
	now->prezero_on = read_number(at(PREZERO "/enabled"));
	/* Memory that was never used is zeroed as well. */
	if (read_text(at(PREZERO "/enabled"), mode, sizeof(mode)) && !strcmp(mode, "all"))
		now->prezero_on = (struct value){ .n = 1, .known = true };
	if (now->prezero_on.known)
		for_each("/proc", read_thread);
	for_each(POOLS, read_pool);
	for_each(VIRTIO, read_balloon);
	if (!read_text(at("/sys/module/page_zeroed_reporter/parameters/mode"), now->test_reporter,
		       sizeof(now->test_reporter)) || !strcmp(now->test_reporter, "off"))
		*now->test_reporter = '\0';
	if (now->series)
		explain();
}

/* The answer */

static char *human(char *text, size_t size, double bytes)
{
	static const char *const units[] = { "B", "KiB", "MiB", "GiB", "TiB", "PiB" };
	unsigned int unit = 0;

	while (bytes >= 1024 && unit < 5) {
		bytes /= 1024;
		unit++;
	}
	snprintf(text, size, unit ? "%.1f %s" : "%.0f %s", bytes, units[unit]);
	return text;
}

enum state { NO_SERIES, IS_BAD, WORKING, READY, WAITING, OFF, NR_STATES };

static const struct { const char *name; int code; } states[] = {
	{ "no_series", NOT_WORKING }, { "bad", NOT_WORKING }, { "working", OK }, { "ready", OK },
	{ "waiting", CANNOT_TELL }, { "off", NOT_WORKING },
};

static char sentence[1024];

static void say(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

static void say(const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(sentence, sizeof(sentence), fmt, ap);
	va_end(ap);
}

static enum state verdict(void)
{
	const uint64_t skipped = now->counter[SKIP].n;
	struct value delay = read_number(at(REPORTING "/page_reporting_delay_ms"));
	char amount[32], ready[32], when[160] = "";
	struct utsname name;

	uname(&name);
	human(amount, sizeof(amount), (double)skipped * (double)page_size);
	human(ready, sizeof(ready), (double)now->all.pages[KNOWN_ZERO].n * (double)page_size);
	if (!now->series) {
		say("No: this kernel (%s) has no pgzeroed_ counters in /proc/vmstat: it lacks the Knownzero series or CONFIG_PAGE_ZEROED.",
		    *root ? "of --root" : name.release);
		return NO_SERIES;
	}
	if (now->counter[BAD].n) {
		say("No: %" PRIu64 " known-zero pages held data; the kernel distrusts all sources until the next boot, and its log (page_zeroed: BUG) names the page.",
		    now->counter[BAD].n);
		return IS_BAD;
	}
	if (!now->on[FREED]) {
		if (obstacle())
			say("No: %s.", obstacle());
		else
			say("No: no source is on. Reported memory: %s. Pre-zeroing: %s.",
			    now->why[REPORTED], now->why[PREZEROED]);
		return OFF;
	}
	if (skipped) {
		say("Yes: the kernel skipped zeroing %s, or %.1f %% of the memory allocated as zeros; %s of free memory is known zero now.",
		    amount, 100.0 * (double)skipped / (double)(skipped + now->counter[CLEARED].n), ready);
		return WORKING;
	}
	if (sum_set()) {
		say("Ready: %s of free memory is known zero, and no allocation has used its zeros so far.",
		    ready);
		return READY;
	}
	if (now->on[REPORTED] && delay.known)
		snprintf(when, sizeof(when), "; free memory is reported %" PRIu64 " ms after it was freed, or on echo 0 > " REPORTING "/flush",
			 delay.n);
	say("Not yet: a source is on, but no memory has become known zero so far%s.", when);
	return WAITING;
}

/* The increase per second of a value in the present look. */
static double rate(const struct value *value)
{
	const char *then = (const char *)before + ((const char *)value - (const char *)now);
	const uint64_t n = ((const struct value *)(const void *)then)->n;

	return value->n > n ? (double)(value->n - n) * 1e9 / (double)(now->ns - before->ns) : 0;
}

/* Text */

static void cell(const struct value *value, uint64_t unit)
{
	char text[32];

	fprintf(out, "%12s", value->known ?
		human(text, sizeof(text), (double)value->n * (double)unit) : "?");
}

static void cells(const struct value *value, uint64_t unit)
{
	char text[32] = "-";

	cell(value, unit);
	if (before && value->known)
		strcat(human(text, sizeof(text) - 2, rate(value) * (double)unit), "/s");
	fprintf(out, "%14s", text);
}

static void show_zone(const char *name, const struct zone *z)
{
	int c;

	fprintf(out, "%-18s", name);
	for (c = 0; c < NR_COLUMNS; c++)
		cell(&z->pages[c], page_size);
	fputc('\n', out);
}

static void show_memory(void)
{
	char name[32];
	int i, j, orders = 0;

	fprintf(out, "%-18s", "memory");
	for (i = 0; i < NR_COLUMNS; i++)
		fprintf(out, "%12s", columns[i].title);
	fputc('\n', out);
	for (i = 0; i < now->nr_zones; i++) {
		snprintf(name, sizeof(name), "node %d %s", now->zones[i].node, now->zones[i].name);
		show_zone(name, &now->zones[i]);
		if (now->zones[i].nr_orders > orders)
			orders = now->zones[i].nr_orders;
	}
	for (i = 0; i < now->nr_nodes && now->nr_nodes > 1; i++) {
		snprintf(name, sizeof(name), "node %d", now->nodes[i].node);
		show_zone(name, &now->nodes[i]);
	}
	show_zone("all", &now->all);
	fprintf(out, "\n%-18s", "blocks by order");
	for (j = 0; j < orders; j++)
		fprintf(out, "%7d", j);
	for (i = 0; i < now->nr_zones; i++) {
		snprintf(name, sizeof(name), "node %d %s", now->zones[i].node, now->zones[i].name);
		fprintf(out, "\n%-18s", name);
		for (j = 0; j < now->zones[i].nr_orders; j++)
			fprintf(out, "%7" PRIu64, now->zones[i].blocks[j]);
	}
	fputc('\n', out);
}

static void show_sources(void)
{
	static const struct { enum counter counter; const char *name, *what; } others[] = {
		{ SKIP, "skipped", "allocated as zeros without being zeroed again" },
		{ LOST, "lost", "no longer known zero, or allocated by a caller that needs no zeros" },
		{ BAD, "bad", "known zero, but holding data" },
		{ CLEARED, "zeroed", "at allocation, since a source is on" },
	};
	int i;

	fprintf(out, "\n%-18s%12s%14s  state\n", "source", "set", "");
	for (i = 0; i < NR_SOURCES; i++) {
		fprintf(out, "%-18s", source_names[i]);
		if (set_of[i] >= 0)
			cells(&now->counter[set_of[i]], page_size);
		else
			fprintf(out, "%12s%14s", "in freed", "");
		if (i == REPORTED && *now->test_reporter)
			fprintf(out, "  on: page_zeroed_reporter, a driver for tests (%s)\n",
				now->test_reporter);
		else
			fprintf(out, "  %s%s%s\n", now->on[i] ? "on" : "off",
				*now->why[i] ? ": " : "", now->why[i]);
	}
	for (i = 0; i < 4; i++) {
		const bool counted = i < 3 || now->counter[CLEARED].n || now->on[FREED];

		fprintf(out, "%s%-18s", i < 3 ? "" : "\n", others[i].name);
		if (counted)
			cells(&now->counter[others[i].counter], page_size);
		else
			fprintf(out, "%12s%14s", "?", "?");
		fprintf(out, "  %s\n", counted ? others[i].what :
			"at allocation: counted once a source is on");
	}
}

/* Of what kzeropaged has zeroed, what is still free: the counters are not read at the same moment. */
static uint64_t prezero_waiting(void)
{
	const uint64_t ended = now->counter[PZ_USED].n + now->counter[PZ_REPORTED].n +
			       now->counter[PZ_TAKEN].n;

	return now->counter[SET_PREZEROED].n > ended ? now->counter[SET_PREZEROED].n - ended : 0;
}

/* Does it pay? */
static void show_prezero_fate(void)
{
	char text[5][32];
	const uint64_t pages[] = {
		now->counter[SET_PREZEROED].n, now->counter[PZ_USED].n, now->counter[PZ_REPORTED].n,
		now->counter[PZ_TAKEN].n, prezero_waiting(),
	};
	int i;

	if (!now->counter[PZ_USED].known)
		return;
	for (i = 0; i < 5; i++)
		human(text[i], sizeof(text[i]), (double)pages[i] * (double)page_size);
	fprintf(out, "%-18szeroed in advance %s: used %s, reported before use %s, taken by others %s, still waiting %s\n",
		"kzeropaged", text[0], text[1], text[2], text[3], text[4]);
}

static void show_prezero(void)
{
	const struct thread *t = now->threads;
	int i;

	show_prezero_fate();

	if (now->cpu_ms.known)
		fprintf(out, "%-18s%12.3f s of CPU time", "kzeropaged", (double)now->cpu_ms.n / 1000);
	if (now->cpu_ms.known && before)
		fprintf(out, " (%.1f %% of a CPU)", rate(&now->cpu_ms) / 10);
	fprintf(out, "%s%-18s%s", now->cpu_ms.known ? "\n" : "", "kzeropaged", now->nr_threads ? "" :
		now->prezero_on.n ? "on; its threads are invisible here" : "off");
	for (i = 0; i < now->nr_threads; i++, t++)
		fprintf(out, "%snode %d: %s (pid %ld)", i ? ", " : "", t->node,
			t->state == 'R' ? "running" : strchr("SI", t->state) ? "sleeping" :
			t->state == 'D' ? "waiting" : "in another state", t->pid);
	fputc('\n', out);
}

static void show(enum state state __attribute__((unused)))
{
	const struct value inflated = now->counter[BALLOON];
	char text[32];
	bool pool = false;
	int i;

	fprintf(out, "%s\n\n", sentence);
	show_memory();
	if (now->series) {
		show_sources();
		if (now->prezero_on.known)
			show_prezero();
	}
	for (i = 0; i < now->nr_pools; i++) {
		const struct value *v = now->pools[i].values;

		if (!v[TOTAL].n)
			continue;
		pool = true;
		fprintf(out, "%-18s%" PRIu64 " of %s, %" PRIu64 " free, %" PRIu64 " reserved, %" PRIu64 " surplus\n",
			"hugetlb", v[TOTAL].n, human(text, sizeof(text), (double)now->pools[i].size),
			v[FREE_PAGES].n, v[RESERVED].n, v[SURPLUS].n);
	}
	if (!pool)
		fprintf(out, "%-18s%s\n", "hugetlb", now->nr_pools ? "no pages in its pools" : "not there");
	fprintf(out, "%-18s%s", "balloon", *now->balloon.device ? now->balloon.device : "no virtio balloon");
	if (*now->balloon.device || inflated.n)
		fprintf(out, ", %s", inflated.known ?
			human(text, sizeof(text), (double)inflated.n * (double)page_size) :
			"its size is unknown (no nr_balloon_pages in /proc/vmstat)");
	fputc('\n', out);
}

/* JSON: each call writes one member, with the comma that it needs; no name within an array. */

static bool comma;

static void json(const char *name, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

static void json(const char *name, const char *fmt, ...)
{
	va_list ap;

	if (comma)
		fputs(", ", out);
	if (name)
		fprintf(out, "\"%s\": ", name);
	va_start(ap, fmt);
	vfprintf(out, fmt, ap);
	va_end(ap);
	comma = !strchr("[{", fmt[0]);
}

static void json_end(char bracket)
{
	fputc(bracket, out);
	comma = true;
}

static void json_value(const char *name, const struct value *value, uint64_t unit)
{
	if (value->known)
		json(name, "%" PRIu64, value->n * unit);
	else
		json(name, "null");
}

static void json_rate(const char *name, const struct value *value, uint64_t unit)
{
	if (before && value->known)
		json(name, "%.1f", rate(value) * (double)unit);
	else
		json(name, "null");
}

static void json_values(const struct file *files, const struct value *values)
{
	int i;

	for (i = 0; i < 4; i++)
		json_value(files[i].json, &values[i], 1);
}

/* An empty text is null. */
static void json_text(const char *name, const char *text)
{
	if (!*text) {
		json(name, "null");
		return;
	}
	json(name, "\"");
	for (; *text; text++) {
		if (strchr("\"\\", *text))
			fputc('\\', out);
		if ((unsigned char)*text < 0x20)
			fprintf(out, "\\u%04x", (unsigned int)*text);
		else
			fputc(*text, out);
	}
	fputc('"', out);
}

static void json_pages(const struct zone *z, int columns_shown)
{
	int c;

	for (c = 0; c < columns_shown; c++)
		json_value(columns[c].json, &z->pages[c], page_size);
}

static void json_memory(void)
{
	int i, j;

	json("zones", "[");
	for (i = 0; i < now->nr_zones; i++) {
		const struct zone *z = &now->zones[i];

		json(NULL, "{");
		json("node", "%d", z->node);
		json("zone", "\"%s\"", z->name);
		json_pages(z, KNOWN_ZERO);
		json("free_blocks", "[");
		for (j = 0; j < z->nr_orders; j++)
			json(NULL, "%" PRIu64, z->blocks[j]);
		json_end(']');
		json_end('}');
	}
	json_end(']');
	json("nodes", "[");
	for (i = 0; i < now->nr_nodes; i++) {
		json(NULL, "{");
		json("node", "%d", now->nodes[i].node);
		json_pages(&now->nodes[i], KNOWN_ZERO);
		json_end('}');
	}
	json_end(']');
	json("memory", "{");
	json_pages(&now->all, NR_COLUMNS);
	json_end('}');
}

static void json_sources(void)
{
	static const char *const names[] = { "skip_pages", "lost_pages", "bad_pages", "cleared_pages" };
	int i;

	json("sources", "{");
	for (i = 0; i < NR_SOURCES; i++) {
		const struct value none = { 0 };
		const struct value *set = set_of[i] < 0 ? &none : &now->counter[set_of[i]];

		json(source_names[i], "{");
		json("on", now->on[i] ? "true" : "false");
		json_text("why", now->why[i]);
		json_value("set_pages", set, 1);
		json_rate("set_pages_per_s", set, 1);
		json_end('}');
	}
	json_end('}');
	for (i = SKIP; i <= CLEARED; i++)
		json_value(names[i - SKIP], &now->counter[i], 1);
	json_rate("skip_pages_per_s", &now->counter[SKIP], 1);
	json_rate("cleared_bytes_per_s", &now->counter[CLEARED], page_size);
}

static void json_prezero(void)
{
	int i;

	json("kzeropaged", "{");
	json("enabled", now->prezero_on.n ? "true" : "false");
	json_value("bytes_zeroed", &now->counter[SET_PREZEROED], page_size);
	json_value("bytes_used", &now->counter[PZ_USED], page_size);
	json_value("bytes_reported", &now->counter[PZ_REPORTED], page_size);
	json_value("bytes_taken", &now->counter[PZ_TAKEN], page_size);
	if (now->counter[PZ_USED].known)
		json("bytes_waiting", "%" PRIu64, prezero_waiting() * page_size);
	else
		json("bytes_waiting", "null");
	json_value("cpu_ms", &now->cpu_ms, 1);
	json_rate("bytes_per_s", &now->counter[SET_PREZEROED], page_size);
	json_rate("cpu_ms_per_s", &now->cpu_ms, 1);
	json("threads", "[");
	for (i = 0; i < now->nr_threads; i++)
		json(NULL, "%s{\"node\": %d, \"pid\": %ld, \"state\": \"%c\"}", "", now->threads[i].node,
		     now->threads[i].pid, now->threads[i].state);
	json_end(']');
	json_end('}');
}

static void show_json(enum state state)
{
	int i;

	comma = false;
	json(NULL, "{");
	json_text("state", states[state].name);
	json_text("sentence", sentence);
	json("page_size", "%" PRIu64, page_size);
	if (before)
		json("interval_s", "%.3f", (double)(now->ns - before->ns) / 1e9);
	else
		json("interval_s", "null");
	json_memory();
	if (now->series)
		json_sources();
	else
		json("sources", "null");
	if (now->series && now->prezero_on.known)
		json_prezero();
	else
		json("kzeropaged", "null");
	json("hugetlb", "[");
	for (i = 0; i < now->nr_pools; i++) {
		json(NULL, "{");
		json("page_size", "%lu", now->pools[i].size);
		json_values(pool_files, now->pools[i].values);
		json_end('}');
	}
	json_end(']');
	json("balloon", "{");
	json_text("device", now->balloon.device);
	json_value("bytes", &now->counter[BALLOON], page_size);
	fputs("}}\n", out);
}

/* Prometheus text format: a metric that the kernel does not provide is left out. */

static void metric(const char *name, const char *type, const char *help)
{
	fprintf(out, "# HELP knownzero_%s %s\n# TYPE knownzero_%s %s\n", name, help, name, type);
}

static void metric_of_counter(int counter, const char *name, const char *type, const char *help)
{
	if (!now->counter[counter].known)
		return;
	metric(name, type, help);
	fprintf(out, "knownzero_%s %" PRIu64 "\n", name,
		now->counter[counter].n * (counter == BAD ? 1 : page_size));
}

static void show_metrics(enum state state)
{
	int i, c;

	metric("state", "gauge", "1 for the state that zeropages reports, 0 for the others.");
	for (i = 0; i < NR_STATES; i++)
		fprintf(out, "knownzero_state{state=\"%s\"} %d\n", states[i].name, i == (int)state);
	metric("memory_bytes", "gauge", "Free memory by kind; dirty is the part that is not known zero.");
	for (c = 0; c < NR_COLUMNS; c++)
		if (now->all.pages[c].known)
			fprintf(out, "knownzero_memory_bytes{kind=\"%s\"} %" PRIu64 "\n",
				columns[c].metric, now->all.pages[c].n * page_size);
	if (now->series)
		metric("source_on", "gauge", "1 if the source is on.");
	for (i = 0; now->series && i < NR_SOURCES; i++)
		fprintf(out, "knownzero_source_on{source=\"%s\"} %d\n", source_names[i], now->on[i]);
	metric_of_counter(BALLOON, "balloon_bytes", "gauge", "Memory in balloons.");
	if (now->series)
		metric("set_bytes_total", "counter", "Memory that became known zero.");
	for (i = 0; now->series && i < NR_SOURCES; i++)
		if (set_of[i] >= 0 && now->counter[set_of[i]].known)
			fprintf(out, "knownzero_set_bytes_total{source=\"%s\"} %" PRIu64 "\n",
				source_names[i], now->counter[set_of[i]].n * page_size);
	metric_of_counter(SKIP, "skipped_bytes_total", "counter",
			  "Memory allocated as zeros without being zeroed again.");
	metric_of_counter(LOST, "lost_bytes_total", "counter",
			  "Memory that is no longer known zero, or whose caller needs no zeros.");
	metric_of_counter(BAD, "bad_pages_total", "counter", "Known-zero pages that held data.");
	metric_of_counter(CLEARED, "cleared_bytes_total", "counter",
			  "Memory zeroed at allocation since a source is on.");
	if (!now->cpu_ms.known)
		return;
	metric_of_counter(PZ_USED, "prezero_used_bytes_total", "counter",
			  "Memory zeroed in advance that an allocation used.");
	metric_of_counter(PZ_REPORTED, "prezero_reported_bytes_total", "counter",
			  "Memory zeroed in advance that was reported first.");
	metric_of_counter(PZ_TAKEN, "prezero_taken_bytes_total", "counter",
			  "Memory zeroed in advance that was lost otherwise.");
	metric("prezero_cpu_seconds_total", "counter", "CPU time of kzeropaged.");
	fprintf(out, "knownzero_prezero_cpu_seconds_total %.3f\n", (double)now->cpu_ms.n / 1000);
}

static void show_check(enum state state __attribute__((unused)))
{
	fprintf(out, "%s\n", sentence);
}

/* Writes a look in one piece, so that a terminal does not flicker. */
static void put(const char *text, bool screen)
{
	if (!screen) {
		fputs(text, stdout);
	} else {
		fputs("\033[H", stdout);
		for (; *text; text++) {
			if (*text == '\n')
				fputs("\033[K", stdout);
			putchar(*text);
		}
		fputs("\033[J", stdout);
	}
	if (fflush(stdout))
		die(CANNOT_TELL, "cannot write to stdout: %s; free space there, or write elsewhere",
		    strerror(errno));
}

static unsigned long number(const char *option, const char *text, unsigned long min, unsigned long max)
{
	unsigned long value;
	char *end;

	errno = 0;
	value = strtoul(text, &end, 0);
	if (errno || end == text || *end || *text == '-' || value < min || value > max)
		die(USAGE, "%s: '%s' is not a whole number from %lu to %lu; see zeropages --help", option,
		    text, min, max);
	return value;
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{ "once", no_argument, NULL, 'o' },
		{ "interval", required_argument, NULL, 'i' },
		{ "count", required_argument, NULL, 'c' },
		{ "json", no_argument, NULL, 'j' },
		{ "metrics", no_argument, NULL, 'm' },
		{ "check", no_argument, NULL, 'k' },
		{ "root", required_argument, NULL, 'r' },
		{ "version", no_argument, NULL, 'v' },
		{ "help", no_argument, NULL, 'h' },
		{ NULL, 0, NULL, 0 },
	};
	static struct snapshot looks[2];
	void (*print)(enum state state) = show;
	unsigned long interval = 0, count = 0, shown = 0;
	bool once = false, screen, quick;
	int opt, forms = 0;

	page_size = (uint64_t)sysconf(_SC_PAGESIZE);
	opterr = 0;
	while ((opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (opt) {
		case 'o':
			once = true;
			break;
		case 'i':
			interval = number("--interval", optarg, 1, 3600);
			break;
		case 'c':
			count = number("--count", optarg, 1, ULONG_MAX);
			break;
		case 'j':
		case 'm':
		case 'k':
			print = opt == 'j' ? show_json : opt == 'm' ? show_metrics : show_check;
			forms++;
			break;
		case 'r':
			root = optarg;
			break;
		case 'v':
			puts("zeropages " VERSION);
			return OK;
		case 'h':
			fputs(usage, stdout);
			return OK;
		default:
			die(USAGE, "'%s': unknown option, or its value is missing; see zeropages --help",
			    argv[optind - 1]);
		}
	}
	quick = print == show_metrics || print == show_check;
	if (optind < argc)
		die(USAGE, "'%s': unexpected argument, options begin with --; see zeropages --help",
		    argv[optind]);
	if (once && count)
		die(USAGE, "--once and --count %lu: each sets the number of looks; see zeropages --help",
		    count);
	if (forms > 1 || (quick && (interval || count)))
		die(USAGE, "%s: --metrics and --check look once and exclude other forms; see zeropages --help",
		    forms > 1 ? "two of --json, --metrics, --check" : "--interval or --count");
	once |= quick;
	screen = isatty(1) && !once && print == show;
	if (screen)
		fputs("\033[2J", stdout);
	now = &looks[0];
	look();
	if (once && interval)
		goto next;
	for (;;) {
		enum state state = verdict();
		char *text = NULL;
		size_t size;

		out = open_memstream(&text, &size);
		if (!out)
			die(CANNOT_TELL, "cannot collect the output: %s; free memory", strerror(errno));
		if (shown++ && print == show && !screen)
			fputc('\n', out);
		print(state);
		fclose(out);
		put(text, screen);
		free(text);
		if (once || shown == count)
			return print == show_check ? states[state].code : OK;
next:
		sleep((unsigned int)(interval ? interval : 2));
		before = now;
		now = now == &looks[0] ? &looks[1] : &looks[0];
		look();
	}
}
