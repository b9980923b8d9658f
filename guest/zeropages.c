// SPDX-License-Identifier: GPL-2.0
/*
 * zeropages: is memory known to be zero on this kernel, how much, who says so, and if not, why not.
 *
 * For any machine: it needs no lab and no privilege, and says what it cannot see. Everything comes
 * from /proc and /sys; what the kernel does not tell is left out, not guessed.
 */
#include "common.h"

#include <ctype.h>
#include <dirent.h>
#include <getopt.h>
#include <sys/utsname.h>

#define MAX_ZONES 256
#define MAX_ORDERS 32
#define MAX_NODES 64
#define MAX_POOLS 8
#define REPORTING "/sys/module/page_reporting/parameters"
#define PREZERO "/sys/kernel/mm/zero_page"
#define FREE_BLOCKS "/sys/kernel/debug/page_zeroed/free_blocks"

enum source { REPORTED, FREED, INFLATED, PREZEROED, NR_SOURCES };

static const char *const source_names[NR_SOURCES] = { "reported", "freed", "inflated", "prezeroed" };

struct zone {
	int node;
	char name[16];
	uint64_t free, cached, zeroed, reported, present;
	uint64_t blocks[MAX_ORDERS], reported_blocks[MAX_ORDERS], zeroed_blocks[MAX_ORDERS];
	int nr_orders;
};

struct thread {
	int node;
	long pid;
	char state;
};

struct prezero_node {
	int node;
	uint64_t bytes, cpu_ms, wakeups, free_zeroed;
};

struct pool {
	uint64_t page_size, total, free, reserved, surplus;
};

struct balloon {
	char device[64];	/* empty: there is none */
	bool driver;
	char features[192];
	unsigned long status;
	bool sized;
	uint64_t pages;
};

struct snapshot {
	uint64_t ns;
	bool series;		/* the counters are there */
	bool marked;		/* nr_free_zeroed is there */
	int by_order;		/* 0 if FREE_BLOCKS could be read, else errno */
	uint64_t set[NR_SOURCES], skip[NR_SOURCES];
	uint64_t unwanted, lost, cleared, bad, free_zeroed, free;
	int nr_zones;
	struct zone zones[MAX_ZONES];
	int nr_nodes;
	struct zone nodes[MAX_NODES], all;	/* the same, added up */
	bool prezero, prezero_on;
	uint64_t prezero_bytes, prezero_cpu_ms;
	int nr_threads, nr_prezero_nodes, nr_pools;
	struct thread threads[MAX_NODES];
	struct prezero_node prezero_nodes[MAX_NODES];
	struct pool pools[MAX_POOLS];
	struct balloon balloon;
	char test_reporter[32];	/* the mode of the test reporter, empty if it is off or absent */
	bool on[NR_SOURCES];
	char why[NR_SOURCES][320];	/* why a source is off */
};

/* What the kernel log says; read on as it grows. */
struct kernel_log {
	int fd;
	bool readable, whole, seen;
	bool init_on_free;
	char not_tracking[160], no_reported[160], no_inflated[160], no_prezero[160];
};

static const char *root = "";
static uint64_t page_size;
static struct kernel_log kernel_log = { .fd = -1 };

static void usage(FILE *out)
{
	fprintf(out,
"usage: zeropages [options]\n"
"Shows what the kernel knows of zero pages: free, known-zero and dirty memory by node and zone,\n"
"who vouches for it, how much zeroing is left out, and in one sentence whether that works.\n"
"  --once           show it once, as totals since boot; with --interval also as rates\n"
"  --interval S     seconds between two looks, 1 to 3600 (default 2)\n"
"  --count N        end after N looks\n"
"  --json           one JSON object a line\n"
"  --root DIR       read DIR/proc and DIR/sys (and DIR/dev/kmsg) instead of the machine's\n"
"  --help           this text\n"
"Exit: 0 it was shown, whatever it was; 2 bad usage; 3 /proc/vmstat or /proc/zoneinfo cannot be read.\n");
}

static const char *at(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* A path under the root, good until the fourth call after. */
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

static bool read_number(const char *path, uint64_t *value)
{
	char text[64], *end;

	*value = 0;
	if (kz_read_file(path, text, sizeof(text)) <= 0)
		return false;
	*value = strtoull(text, &end, 0);
	return end != text;
}

/* Is the boolean parameter at @path there, and off? */
static bool is_refused(const char *path)
{
	char text[8];

	return kz_read_file(path, text, sizeof(text)) > 0 && (*text == 'N' || *text == '0');
}

static bool on_command_line(const char *name)
{
	static char text[8192];
	char *word, *rest;
	size_t len = strlen(name);
	bool on = false;

	if (kz_read_file(at("/proc/cmdline"), text, sizeof(text)) < 0)
		return false;
	for (word = strtok_r(text, " \n", &rest); word; word = strtok_r(NULL, " \n", &rest)) {
		if (strncmp(word, name, len) || word[len] != '=')
			continue;
		word += len + 1;
		/* As kstrtobool() has it; the last one counts. */
		on = *word == '1' || tolower(*word) == 'y' || tolower(*word) == 't' ||
		     (tolower(*word) == 'o' && tolower(word[1]) == 'n');
	}
	return on;
}

/* The kernel log */

static void keep(const char *line, const char *sign, char *to, size_t size)
{
	const char *found = strstr(line, sign);

	if (found)
		snprintf(to, size, "%s", found + strlen(sign));
}

static void log_line(struct kernel_log *log, const char *line)
{
	if (!log->seen) {
		const char *sequence = strchr(line, ',');

		log->seen = true;
		/* "PRIORITY,SEQUENCE,…": is that the first that was ever written? */
		log->whole = sequence && !strncmp(sequence, ",0,", 3);
	}
	keep(line, "page_zeroed: not tracking known-zero pages: ", log->not_tracking,
	     sizeof(log->not_tracking));
	keep(line, "not using DEVICE_INIT_REPORTED: ", log->no_reported, sizeof(log->no_reported));
	keep(line, "not using DEVICE_INIT_ON_INFLATE: ", log->no_inflated,
	     sizeof(log->no_inflated));
	keep(line, "prezero: free memory cannot be zeroed: ", log->no_prezero,
	     sizeof(log->no_prezero));
	if (strstr(line, "mem auto-init: ") && strstr(line, "heap free:on"))
		log->init_on_free = true;
}

static void read_log(struct kernel_log *log)
{
	static char text[65536];
	char *line, *rest;
	ssize_t got;

	if (log->fd < 0)
		log->fd = open(at("/dev/kmsg"), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	if (log->fd < 0)
		return;
	/* A record a read, or as much as there is of a plain file (--root). */
	for (;;) {
		got = read(log->fd, text, sizeof(text) - 1);
		if (got < 0 && (errno == EPIPE || errno == EINTR))
			continue;
		if (got <= 0)
			break;
		log->readable = true;
		text[got] = '\0';
		for (line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest))
			log_line(log, line);
	}
	if (got < 0 && errno != EAGAIN)
		log->readable = false;
}

/* What is counted */

static void read_vmstat(struct snapshot *s)
{
	static struct kz_vmstat v;
	char name[64];
	int i;

	if (kz_read_file(at("/proc/vmstat"), v.text, sizeof(v.text)) <= 0)
		kz_die(KZ_BROKEN, "cannot read %s: is /proc mounted?", at("/proc/vmstat"));
	s->series = kz_vmstat_get(&v, "pgzeroed_cleared", &s->cleared);
	for (i = 0; i < NR_SOURCES; i++) {
		snprintf(name, sizeof(name), "pgzeroed_set_%s", source_names[i]);
		kz_vmstat_get(&v, name, &s->set[i]);
		snprintf(name, sizeof(name), "pgzeroed_skip_%s", source_names[i]);
		kz_vmstat_get(&v, name, &s->skip[i]);
	}
	kz_vmstat_get(&v, "pgzeroed_unwanted", &s->unwanted);
	kz_vmstat_get(&v, "pgzeroed_lost", &s->lost);
	kz_vmstat_get(&v, "pgzeroed_bad", &s->bad);
	s->marked = kz_vmstat_get(&v, "nr_free_zeroed", &s->free_zeroed);
	kz_vmstat_get(&v, "nr_free_pages", &s->free);
	s->balloon.sized = kz_vmstat_get(&v, "nr_balloon_pages", &s->balloon.pages);
}

static void read_zones(struct snapshot *s)
{
	char line[256], name[16];
	struct zone *zone = NULL;
	uint64_t value;
	int node;
	FILE *f = fopen(at("/proc/zoneinfo"), "re");

	if (!f)
		kz_die(KZ_BROKEN, "cannot read %s: %s", at("/proc/zoneinfo"), strerror(errno));
	while (fgets(line, sizeof(line), f)) {
		if (sscanf(line, "Node %d, zone %15s", &node, name) == 2) {
			/* One without memory is no zone. */
			if (!zone || zone->present)
				zone = s->nr_zones < MAX_ZONES ? &s->zones[s->nr_zones++] : NULL;
			if (!zone)
				break;
			*zone = (struct zone){ .node = node };
			snprintf(zone->name, sizeof(zone->name), "%s", name);
		} else if (!zone) {
			continue;
		} else if (sscanf(line, " present %" SCNu64, &value) == 1) {
			zone->present = value;
		} else if (sscanf(line, " nr_free_pages %" SCNu64, &value) == 1 ||
			   sscanf(line, " pages free %" SCNu64, &value) == 1) {
			zone->free = value;
		} else if (sscanf(line, " nr_free_zeroed %" SCNu64, &value) == 1) {
			zone->zeroed = value;
		} else if (sscanf(line, " count: %" SCNu64, &value) == 1) {
			zone->cached += value;
		}
	}
	fclose(f);
	if (zone && !zone->present)
		s->nr_zones--;
}

static void add_zone(struct zone *to, const struct zone *zone)
{
	to->free += zone->free;
	to->cached += zone->cached;
	to->zeroed += zone->zeroed;
	to->reported += zone->reported;
}

static void add_zones(struct snapshot *s)
{
	int i, j;

	for (i = 0; i < s->nr_zones; i++) {
		for (j = 0; j < s->nr_nodes && s->nodes[j].node != s->zones[i].node; j++)
			;
		if (j == s->nr_nodes && j < MAX_NODES)
			s->nodes[s->nr_nodes++].node = s->zones[i].node;
		if (j < MAX_NODES)
			add_zone(&s->nodes[j], &s->zones[i]);
		add_zone(&s->all, &s->zones[i]);
	}
}

/* Numbers of blocks by order: /proc/buddyinfo, or FREE_BLOCKS, which says what kind they are. 0 or errno. */
static int read_orders(struct snapshot *s, const char *path)
{
	char line[512], name[16];
	int node, used, i;
	FILE *f = fopen(at("%s", path), "re");

	if (!f)
		return errno;
	while (fgets(line, sizeof(line), f)) {
		struct zone *zone = NULL;
		uint64_t *blocks;
		char *from, *end, kind[16] = "";

		if (sscanf(line, "Node %d, zone %15s%n", &node, name, &used) != 2)
			continue;
		for (i = 0; i < s->nr_zones; i++)
			if (s->zones[i].node == node && !strcmp(s->zones[i].name, name))
				zone = &s->zones[i];
		if (!zone)
			continue;
		from = line + used;
		if (sscanf(from, " %15[a-z]%n", kind, &used) == 1)
			from += used;
		if (!*kind)
			blocks = zone->blocks;
		else if (!strcmp(kind, "reported"))
			blocks = zone->reported_blocks;
		else if (!strcmp(kind, "zeroed"))
			blocks = zone->zeroed_blocks;
		else
			continue;
		for (i = 0; i < MAX_ORDERS; i++, from = end) {
			uint64_t value = strtoull(from, &end, 10);

			if (end == from)
				break;
			blocks[i] = value;
			if (blocks == zone->reported_blocks)
				zone->reported += value << i;
		}
		if (blocks == zone->blocks)
			zone->nr_orders = i;
	}
	fclose(f);
	return 0;
}

static void read_threads(struct snapshot *s)
{
	DIR *dir = opendir(at("/proc"));
	struct dirent *entry;

	while (dir && (entry = readdir(dir)) && s->nr_threads < MAX_NODES) {
		struct thread *thread = &s->threads[s->nr_threads];
		char text[512], *end;

		if (!isdigit((unsigned char)*entry->d_name) ||
		    kz_read_file(at("/proc/%s/stat", entry->d_name), text, sizeof(text)) <= 0)
			continue;
		end = strrchr(text, ')');
		/* A kernel thread's parent is kthreadd: anybody can call himself so. */
		if (!end || sscanf(text, "%ld (kzeropaged%d)", &thread->pid, &thread->node) != 2 ||
		    strncmp(end + 1, " ", 1) || strncmp(end + 3, " 2 ", 3))
			continue;
		thread->state = end[2];
		s->nr_threads++;
	}
	if (dir)
		closedir(dir);
}

static void read_prezero(struct snapshot *s)
{
	struct dirent *entry;
	uint64_t on;
	DIR *dir = opendir(at(PREZERO));

	s->prezero = dir && read_number(at(PREZERO "/enabled"), &on);
	if (!s->prezero)
		goto out;
	s->prezero_on = on;
	read_number(at(PREZERO "/bytes_zeroed"), &s->prezero_bytes);
	read_number(at(PREZERO "/cpu_millisecs"), &s->prezero_cpu_ms);
	while ((entry = readdir(dir)) && s->nr_prezero_nodes < MAX_NODES) {
		struct prezero_node *node = &s->prezero_nodes[s->nr_prezero_nodes];
		const char *name = entry->d_name;

		if (sscanf(name, "node%d", &node->node) != 1)
			continue;
		read_number(at(PREZERO "/%s/bytes_zeroed", name), &node->bytes);
		read_number(at(PREZERO "/%s/cpu_millisecs", name), &node->cpu_ms);
		read_number(at(PREZERO "/%s/wakeups", name), &node->wakeups);
		read_number(at(PREZERO "/%s/free_zeroed_bytes", name), &node->free_zeroed);
		s->nr_prezero_nodes++;
	}
	read_threads(s);
out:
	if (dir)
		closedir(dir);
}

static void read_pools(struct snapshot *s)
{
	DIR *dir = opendir(at("/sys/kernel/mm/hugepages"));
	struct dirent *entry;

	while (dir && (entry = readdir(dir)) && s->nr_pools < MAX_POOLS) {
		struct pool *pool = &s->pools[s->nr_pools];
		const char *name = entry->d_name;
		unsigned long kb;

		if (sscanf(name, "hugepages-%lukB", &kb) != 1)
			continue;
		pool->page_size = kb * 1024ULL;
#define POOL(file, to) read_number(at("/sys/kernel/mm/hugepages/%s/" file, name), &pool->to)
		POOL("nr_hugepages", total);
		POOL("free_hugepages", free);
		POOL("resv_hugepages", reserved);
		POOL("surplus_hugepages", surplus);
#undef POOL
		s->nr_pools++;
	}
	if (dir)
		closedir(dir);
}

static bool has_feature(const struct balloon *b, unsigned int bit)
{
	return strlen(b->features) > bit && b->features[bit] == '1';
}

static void read_balloon(struct balloon *b)
{
	DIR *dir = opendir(at("/sys/bus/virtio/devices"));
	struct dirent *entry;
	uint64_t value;

	while (dir && (entry = readdir(dir))) {
		const char *name = entry->d_name;

		if (*name == '.' || !read_number(at("/sys/bus/virtio/devices/%s/device", name), &value) ||
		    value != 5)
			continue;
		snprintf(b->device, sizeof(b->device), "%.60s", name);
		b->driver = !access(at("/sys/bus/virtio/devices/%s/driver", name), F_OK);
		kz_read_file(at("/sys/bus/virtio/devices/%s/features", name), b->features,
			     sizeof(b->features));
		read_number(at("/sys/bus/virtio/devices/%s/status", name), &value);
		b->status = value;
		if (b->driver)
			break;
	}
	if (dir)
		closedir(dir);
}

/* Why not */

/* What keeps this kernel from using zeros at all, or NULL. */
static const char *obstacle(const struct kernel_log *log)
{
	if (*log->not_tracking)
		return log->not_tracking;
	if (on_command_line("page_poison"))
		return "free pages are poisoned (page_poison=1)";
	if (on_command_line("init_on_free") || log->init_on_free)
		return "free pages are zero anyway (init_on_free=1)";
	return NULL;
}

/* Why the device is not asked what is zero: @bit is what it would have to offer. */
static void explain_device(const struct balloon *b, const struct kernel_log *log, unsigned int bit,
			   const char *parameter, const char *said, const char *offer, char *why,
			   size_t size)
{
	const char *general = obstacle(log);
	char path[128];

	snprintf(path, sizeof(path), "/sys/module/virtio_balloon/parameters/%s", parameter);
	if (!*b->device)
		snprintf(why, size, "there is no virtio balloon");
	else if (!b->driver)
		snprintf(why, size, "%s, a balloon, has no driver (CONFIG_VIRTIO_BALLOON)", b->device);
	else if (b->status & 0xc0 || !(b->status & 4))
		snprintf(why, size, "the driver of %s is not running (status 0x%lx)", b->device,
			 b->status);
	else if (is_refused(at("%s", path)))
		snprintf(why, size, "refused by the parameter virtio_balloon.%s", parameter);
	else if (bit == 6 && !has_feature(b, 5))
		snprintf(why, size, "free pages are not reported: %s",
			 access(at(REPORTING), F_OK) ? "the kernel has no CONFIG_PAGE_REPORTING" :
			 "the device does not offer it (free-page-reporting=on in QEMU)");
	else if (*said)
		snprintf(why, size, "%s", said);
	else if (general)
		snprintf(why, size, "%s", general);
	else if (!has_feature(b, 32))
		snprintf(why, size, "%s is a legacy device", b->device);
	else if (log->readable && log->whole)
		snprintf(why, size, "the device does not offer bit %u (%s)", bit, offer);
	else
		snprintf(why, size, "bit %u is not negotiated: the device does not offer it (%s), or the driver has refused it, and the kernel log, which has the reason, cannot be read",
			 bit, offer);
}

static void explain(struct snapshot *s, const struct kernel_log *log)
{
	const struct balloon *b = &s->balloon;
	const bool running = *b->device && b->driver && (b->status & 0xc4) == 4;
	const char *general = obstacle(log);

	if (!s->series)
		return;
	if (*s->test_reporter) {
		s->on[REPORTED] = true;
	} else if (running && has_feature(b, 6)) {
		s->on[REPORTED] = !has_feature(b, 33);
		if (!s->on[REPORTED])
			snprintf(s->why[REPORTED], sizeof(s->why[REPORTED]),
				 "%s uses the DMA API (VIRTIO_F_ACCESS_PLATFORM)", b->device);
	} else {
		explain_device(b, log, 6, "device_init_reported", log->no_reported,
			       "QEMU with the series does, with free-page-reporting=on",
			       s->why[REPORTED], sizeof(s->why[REPORTED]));
	}
	if (running && has_feature(b, 7)) {
		s->on[INFLATED] = !has_feature(b, 33);
		if (!s->on[INFLATED])
			snprintf(s->why[INFLATED], sizeof(s->why[INFLATED]),
				 "%s uses the DMA API (VIRTIO_F_ACCESS_PLATFORM)", b->device);
	} else {
		explain_device(b, log, 7, "device_init_on_inflate", log->no_inflated,
			       "QEMU with the series does, with device-init-on-inflate=on",
			       s->why[INFLATED], sizeof(s->why[INFLATED]));
	}
	s->on[PREZEROED] = s->prezero_on;
	if (!s->prezero)
		snprintf(s->why[PREZEROED], sizeof(s->why[PREZEROED]),
			 "the kernel has no CONFIG_PREZERO_PAGE");
	else if (!s->prezero_on)
		snprintf(s->why[PREZEROED], sizeof(s->why[PREZEROED]), "%s",
			 *log->no_prezero ? log->no_prezero : general ? general :
			 "not turned on (echo 1 > " PREZERO "/enabled)");
	/* What is freed unused is as good as the word it was handed out on. */
	s->on[FREED] = s->on[REPORTED] || s->on[INFLATED] || s->on[PREZEROED];
	if (!s->on[FREED])
		snprintf(s->why[FREED], sizeof(s->why[FREED]), "no other source is on");
}

static void look(struct snapshot *s)
{
	memset(s, 0, sizeof(*s));
	read_log(&kernel_log);
	s->ns = kz_now_ns();
	read_vmstat(s);
	read_zones(s);
	read_orders(s, "/proc/buddyinfo");
	s->by_order = read_orders(s, FREE_BLOCKS);
	add_zones(s);
	read_prezero(s);
	read_pools(s);
	read_balloon(&s->balloon);
	if (kz_read_file(at("/sys/module/page_zeroed_reporter/parameters/mode"), s->test_reporter,
			 sizeof(s->test_reporter)) < 0 || !strcmp(s->test_reporter, "off"))
		*s->test_reporter = '\0';
	explain(s, &kernel_log);
}

/* The answer */

static uint64_t sum(const uint64_t *values)
{
	return values[REPORTED] + values[FREED] + values[INFLATED] + values[PREZEROED];
}

static void human(char *to, size_t size, double bytes)
{
	static const char *const units[] = { "B", "KiB", "MiB", "GiB", "TiB", "PiB" };
	unsigned int unit = 0;

	while (bytes >= 1024 && unit < 5) {
		bytes /= 1024;
		unit++;
	}
	snprintf(to, size, unit ? "%.1f %s" : "%.0f %s", bytes, units[unit]);
}

static const char *verdict(const struct snapshot *s, char *sentence, size_t size)
{
	const uint64_t skipped = sum(s->skip), set = sum(s->set);
	const char *general = obstacle(&kernel_log);
	char amount[32], now[32];
	struct utsname name;

	uname(&name);
	human(amount, sizeof(amount), (double)skipped * (double)page_size);
	human(now, sizeof(now), (double)s->free_zeroed * (double)page_size);
	if (!s->series) {
		snprintf(sentence, size, "No: this kernel (%s) has no pgzeroed_ counters in /proc/vmstat, so it is without the Knownzero series, or built without CONFIG_PAGE_ZEROED.",
			 *root ? "of --root" : name.release);
		return "no_series";
	}
	if (s->bad) {
		snprintf(sentence, size, "No: %" PRIu64 " pages that were known to be zero were not; who vouched for them is not believed until the next boot, and the kernel log (page_zeroed: BUG) says who it was.",
			 s->bad);
		return "bad";
	}
	if (skipped) {
		snprintf(sentence, size, "Yes: %s, or %.1f %% of what was wanted as zeros since there is a source, did not have to be zeroed; %s of free memory is known to be zero now.",
			 amount, 100.0 * (double)skipped / (double)(skipped + s->cleared), now);
		return "working";
	}
	if (set) {
		snprintf(sentence, size, "Ready: %s of free memory is known to be zero, and none of it was wanted as zeros so far.",
			 now);
		return "ready";
	}
	if (s->on[FREED]) {
		uint64_t delay;
		char when[160] = "";

		if (s->on[REPORTED] && read_number(at(REPORTING "/page_reporting_delay_ms"), &delay))
			snprintf(when, sizeof(when), "; free memory is reported %" PRIu64 " ms after it was freed, or on echo 0 > " REPORTING "/flush",
				 delay);
		snprintf(sentence, size, "Not yet: a source is on, but nothing has become known zero so far%s.",
			 when);
		return "waiting";
	}
	if (general)
		snprintf(sentence, size, "No: %s.", general);
	else
		snprintf(sentence, size, "No: nobody tells the kernel what is zero. Reported memory: %s. Pre-zeroing: %s.",
			 s->why[REPORTED], s->why[PREZEROED]);
	return "off";
}

static uint64_t dirty_pages(uint64_t free, uint64_t cached, uint64_t zeroed)
{
	/* What is counted moves while it is read. */
	return free + cached > zeroed ? free + cached - zeroed : 0;
}

/* Pages or bytes a second since the look before. */
static double rate(const struct snapshot *s, const struct snapshot *before, uint64_t now, uint64_t then)
{
	return now > then ? (double)(now - then) * 1e9 / (double)(s->ns - before->ns) : 0;
}

/* For people */

static void cell(FILE *out, uint64_t pages)
{
	char text[32];

	human(text, sizeof(text), (double)pages * (double)page_size);
	fprintf(out, "%12s", text);
}

static void cell_rate(FILE *out, const struct snapshot *s, const struct snapshot *before,
		      uint64_t now, uint64_t then, uint64_t unit)
{
	char text[32];

	if (!before) {
		fprintf(out, "%14s", "-");
		return;
	}
	human(text, sizeof(text) - 2, rate(s, before, now, then) * (double)unit);
	strcat(text, "/s");
	fprintf(out, "%14s", text);
}

static void show_known(FILE *out, const struct snapshot *s, const char *name, const struct zone *z)
{
	fprintf(out, "%-18s", name);
	cell(out, z->free);
	cell(out, z->cached);
	if (s->by_order)
		fprintf(out, "%12s", "?");
	else
		cell(out, z->reported);
	if (s->marked) {
		cell(out, z->zeroed);
		cell(out, dirty_pages(z->free, z->cached, z->zeroed));
	} else {
		fprintf(out, "%12s%12s", "?", "?");
	}
	fputc('\n', out);
}

static void show_orders(FILE *out, const char *name, const uint64_t *blocks, int orders)
{
	int i;

	fprintf(out, "\n%-18s", name);
	for (i = 0; i < orders; i++)
		fprintf(out, "%7" PRIu64, blocks[i]);
}

static void show_memory(FILE *out, const struct snapshot *s)
{
	int i, j, orders = 0;

	fprintf(out, "%-18s%12s%12s%12s%12s%12s\n", "memory", "free", "CPU lists", "reported",
		"known zero", "dirty");
	for (i = 0; i < s->nr_zones; i++) {
		const struct zone *z = &s->zones[i];
		char name[32];

		snprintf(name, sizeof(name), "node %d %s", z->node, z->name);
		show_known(out, s, name, z);
		if (z->nr_orders > orders)
			orders = z->nr_orders;
	}
	for (i = 0; i < s->nr_nodes && s->nr_nodes > 1; i++) {
		char name[32];

		snprintf(name, sizeof(name), "node %d", s->nodes[i].node);
		show_known(out, s, name, &s->nodes[i]);
	}
	show_known(out, s, "all", &s->all);
	fprintf(out, "\n%-18s", "blocks by order");
	for (j = 0; j < orders; j++)
		fprintf(out, "%7d", j);
	for (i = 0; i < s->nr_zones; i++) {
		const struct zone *z = &s->zones[i];
		char name[32];

		snprintf(name, sizeof(name), "node %d %s", z->node, z->name);
		show_orders(out, name, z->blocks, z->nr_orders);
		if (s->by_order)
			continue;
		show_orders(out, "  reported", z->reported_blocks, z->nr_orders);
		show_orders(out, "  known zero", z->zeroed_blocks, z->nr_orders);
	}
	if (s->by_order && s->marked)
		fprintf(out, "\n%-18s(free ones; what of them is known zero or reported is in %s: %s)", "",
			FREE_BLOCKS, s->by_order == EACCES ? "only for root" :
			s->by_order == ENOENT ? "no debugfs, or an older kernel" :
			strerror(s->by_order));
	fputc('\n', out);
}

static void show_sources(FILE *out, const struct snapshot *s, const struct snapshot *before)
{
	int i;

	fprintf(out, "\n%-18s%12s%14s%12s%14s  state\n", "source", "set", "", "skipped", "");
	for (i = 0; i < NR_SOURCES; i++) {
		fprintf(out, "%-18s", source_names[i]);
		cell(out, s->set[i]);
		cell_rate(out, s, before, s->set[i], before ? before->set[i] : 0, page_size);
		cell(out, s->skip[i]);
		cell_rate(out, s, before, s->skip[i], before ? before->skip[i] : 0, page_size);
		if (i == REPORTED && *s->test_reporter)
			fprintf(out, "  on: page_zeroed_reporter, a driver for tests (%s)\n",
				s->test_reporter);
		else
			fprintf(out, "  %s%s%s\n", s->on[i] ? "on" : "off", *s->why[i] ? ": " : "",
				s->why[i]);
	}
#define LINE(name, field, what) do {							\
	fprintf(out, "%-18s", name);							\
	cell(out, s->field);								\
	cell_rate(out, s, before, s->field, before ? before->field : 0, page_size);	\
	fprintf(out, "  %s\n", what);							\
} while (0)
	LINE("unwanted", unwanted, "known zero, went to somebody who wants no zeros");
	LINE("lost", lost, "no longer known zero, and still free");
	LINE("bad", bad, "known zero, and found not to be");
	fprintf(out, "\n%-18s", "zeroed");
	if (s->cleared || s->on[FREED]) {
		cell(out, s->cleared);
		cell_rate(out, s, before, s->cleared, before ? before->cleared : 0, page_size);
		fprintf(out, "  by allocation, since there is a source\n");
	} else {
		fprintf(out, "%12s%14s  by allocation: counted only when there is a source\n", "?", "?");
	}
#undef LINE
}

static void show_prezero(FILE *out, const struct snapshot *s, const struct snapshot *before)
{
	char text[32];
	int i;

	if (!s->prezero)
		return;
	human(text, sizeof(text), (double)s->prezero_bytes);
	fprintf(out, "%-18s%12s", "", text);
	cell_rate(out, s, before, s->prezero_bytes, before ? before->prezero_bytes : 0, 1);
	fprintf(out, "  by kzeropaged, in %" PRIu64 ".%03" PRIu64 " s of CPU time",
		s->prezero_cpu_ms / 1000, s->prezero_cpu_ms % 1000);
	if (before)
		fprintf(out, " (%.1f %% of a CPU)",
			rate(s, before, s->prezero_cpu_ms, before->prezero_cpu_ms) / 10);
	fputc('\n', out);
	fprintf(out, "%-18s%s", "kzeropaged", s->nr_threads ? "" :
		s->prezero_on ? "on, but its threads cannot be seen from here" : "off");
	for (i = 0; i < s->nr_threads; i++)
		fprintf(out, "%snode %d: %s (pid %ld)", i ? ", " : "", s->threads[i].node,
			s->threads[i].state == 'R' ? "running" :
			s->threads[i].state == 'S' || s->threads[i].state == 'I' ? "sleeping" :
			s->threads[i].state == 'D' ? "waiting" : "in another state",
			s->threads[i].pid);
	fputc('\n', out);
}

static void show(FILE *out, const struct snapshot *s, const struct snapshot *before)
{
	char sentence[1024], text[32], text2[32];
	bool pool = false;
	int i;

	verdict(s, sentence, sizeof(sentence));
	fprintf(out, "%s\n\n", sentence);
	show_memory(out, s);
	if (s->series) {
		show_sources(out, s, before);
		show_prezero(out, s, before);
	}
	for (i = 0; i < s->nr_pools; i++) {
		if (!s->pools[i].total)
			continue;
		pool = true;
		human(text, sizeof(text), (double)s->pools[i].page_size);
		fprintf(out, "%-18s%" PRIu64 " of %s, %" PRIu64 " free, %" PRIu64 " reserved, %" PRIu64 " surplus\n",
			"hugetlb", s->pools[i].total, text, s->pools[i].free, s->pools[i].reserved,
			s->pools[i].surplus);
	}
	if (!pool)
		fprintf(out, "%-18s%s\n", "hugetlb", s->nr_pools ? "no pages in its pools" : "not there");
	human(text2, sizeof(text2), (double)s->balloon.pages * (double)page_size);
	fprintf(out, "%-18s%s%s%s\n", "balloon",
		*s->balloon.device ? s->balloon.device : "no virtio balloon",
		*s->balloon.device || s->balloon.pages ? ", " : "",
		!*s->balloon.device && !s->balloon.pages ? "" :
		s->balloon.sized ? text2 : "of a size that this kernel does not tell");
}

/* For programs */

static void json_text(FILE *out, const char *text)
{
	fputc('"', out);
	for (; *text; text++) {
		if (*text == '"' || *text == '\\')
			fputc('\\', out);
		if ((unsigned char)*text < 0x20)
			fprintf(out, "\\u%04x", *text);
		else
			fputc(*text, out);
	}
	fputc('"', out);
}

static void json_rate(FILE *out, const char *name, const struct snapshot *s,
		      const struct snapshot *before, uint64_t now, uint64_t then)
{
	if (before)
		fprintf(out, ", \"%s\": %.1f", name, rate(s, before, now, then));
	else
		fprintf(out, ", \"%s\": null", name);
}

static void json_known(FILE *out, const struct snapshot *s, const struct zone *z)
{
	fprintf(out, "\"free_bytes\": %" PRIu64 ", \"cpu_list_bytes\": %" PRIu64,
		z->free * page_size, z->cached * page_size);
	if (s->marked)
		fprintf(out, ", \"known_zero_bytes\": %" PRIu64 ", \"dirty_bytes\": %" PRIu64,
			z->zeroed * page_size,
			dirty_pages(z->free, z->cached, z->zeroed) * page_size);
	else
		fprintf(out, ", \"known_zero_bytes\": null, \"dirty_bytes\": null");
	if (s->by_order)
		fprintf(out, ", \"reported_bytes\": null");
	else
		fprintf(out, ", \"reported_bytes\": %" PRIu64, z->reported * page_size);
}

static void json_orders(FILE *out, const char *name, const uint64_t *blocks, int orders)
{
	int i;

	fprintf(out, ", \"%s\": [", name);
	for (i = 0; i < orders; i++)
		fprintf(out, "%s%" PRIu64, i ? ", " : "", blocks[i]);
	fputc(']', out);
}

static void json_memory(FILE *out, const struct snapshot *s)
{
	int i;

	fprintf(out, ", \"zones\": [");
	for (i = 0; i < s->nr_zones; i++) {
		const struct zone *z = &s->zones[i];

		fprintf(out, "%s{\"node\": %d, \"zone\": \"%s\", ", i ? ", " : "", z->node, z->name);
		json_known(out, s, z);
		json_orders(out, "free_blocks", z->blocks, z->nr_orders);
		if (s->by_order) {
			fprintf(out, ", \"reported_blocks\": null, \"known_zero_blocks\": null}");
			continue;
		}
		json_orders(out, "reported_blocks", z->reported_blocks, z->nr_orders);
		json_orders(out, "known_zero_blocks", z->zeroed_blocks, z->nr_orders);
		fputc('}', out);
	}
	fprintf(out, "], \"nodes\": [");
	for (i = 0; i < s->nr_nodes; i++) {
		fprintf(out, "%s{\"node\": %d, ", i ? ", " : "", s->nodes[i].node);
		json_known(out, s, &s->nodes[i]);
		fprintf(out, "}");
	}
	fprintf(out, "], \"memory\": {");
	json_known(out, s, &s->all);
	fprintf(out, "}");
}

static void json_sources(FILE *out, const struct snapshot *s, const struct snapshot *before)
{
	int i;

	fprintf(out, ", \"sources\": {");
	for (i = 0; i < NR_SOURCES; i++) {
		fprintf(out, "%s\"%s\": {\"on\": %s, \"why\": ", i ? ", " : "", source_names[i],
			s->on[i] ? "true" : "false");
		if (*s->why[i])
			json_text(out, s->why[i]);
		else
			fprintf(out, "null");
		fprintf(out, ", \"set_pages\": %" PRIu64 ", \"skip_pages\": %" PRIu64, s->set[i],
			s->skip[i]);
		json_rate(out, "set_pages_per_s", s, before, s->set[i], before ? before->set[i] : 0);
		json_rate(out, "skip_pages_per_s", s, before, s->skip[i], before ? before->skip[i] : 0);
		fprintf(out, "}");
	}
	fprintf(out, "}, \"unwanted_pages\": %" PRIu64 ", \"lost_pages\": %" PRIu64
		", \"bad_pages\": %" PRIu64 ", \"cleared_pages\": %" PRIu64,
		s->unwanted, s->lost, s->bad, s->cleared);
	json_rate(out, "cleared_bytes_per_s", s, before, s->cleared * page_size,
		  before ? before->cleared * page_size : 0);
}

static void json_prezero(FILE *out, const struct snapshot *s, const struct snapshot *before)
{
	int i;

	if (!s->prezero) {
		fprintf(out, ", \"kzeropaged\": null");
		return;
	}
	fprintf(out, ", \"kzeropaged\": {\"enabled\": %s, \"bytes_zeroed\": %" PRIu64 ", \"cpu_ms\": %" PRIu64,
		s->prezero_on ? "true" : "false", s->prezero_bytes, s->prezero_cpu_ms);
	json_rate(out, "bytes_per_s", s, before, s->prezero_bytes, before ? before->prezero_bytes : 0);
	json_rate(out, "cpu_ms_per_s", s, before, s->prezero_cpu_ms,
		  before ? before->prezero_cpu_ms : 0);
	fprintf(out, ", \"threads\": [");
	for (i = 0; i < s->nr_threads; i++)
		fprintf(out, "%s{\"node\": %d, \"pid\": %ld, \"state\": \"%c\"}", i ? ", " : "",
			s->threads[i].node, s->threads[i].pid, s->threads[i].state);
	fprintf(out, "], \"nodes\": [");
	for (i = 0; i < s->nr_prezero_nodes; i++) {
		const struct prezero_node *n = &s->prezero_nodes[i];

		fprintf(out, "%s{\"node\": %d, \"bytes_zeroed\": %" PRIu64 ", \"cpu_ms\": %" PRIu64
			", \"wakeups\": %" PRIu64 ", \"free_zeroed_bytes\": %" PRIu64 "}",
			i ? ", " : "", n->node, n->bytes, n->cpu_ms, n->wakeups, n->free_zeroed);
	}
	fprintf(out, "]}");
}

static void json(FILE *out, const struct snapshot *s, const struct snapshot *before)
{
	char sentence[1024];
	const char *state = verdict(s, sentence, sizeof(sentence));
	int i;

	fprintf(out, "{\"state\": \"%s\", \"sentence\": ", state);
	json_text(out, sentence);
	fprintf(out, ", \"page_size\": %" PRIu64 ", \"interval_s\": ", page_size);
	if (before)
		fprintf(out, "%.3f", (double)(s->ns - before->ns) / 1e9);
	else
		fprintf(out, "null");
	json_memory(out, s);
	if (s->series) {
		json_sources(out, s, before);
		json_prezero(out, s, before);
	} else {
		fprintf(out, ", \"sources\": null, \"kzeropaged\": null");
	}
	fprintf(out, ", \"hugetlb\": [");
	for (i = 0; i < s->nr_pools; i++)
		fprintf(out, "%s{\"page_size\": %" PRIu64 ", \"total\": %" PRIu64 ", \"free\": %" PRIu64
			", \"reserved\": %" PRIu64 ", \"surplus\": %" PRIu64 "}", i ? ", " : "",
			s->pools[i].page_size, s->pools[i].total, s->pools[i].free,
			s->pools[i].reserved, s->pools[i].surplus);
	fprintf(out, "], \"balloon\": {\"device\": ");
	if (*s->balloon.device)
		json_text(out, s->balloon.device);
	else
		fprintf(out, "null");
	fprintf(out, ", \"bytes\": ");
	if (s->balloon.sized)
		fprintf(out, "%" PRIu64, s->balloon.pages * page_size);
	else
		fprintf(out, "null");
	fprintf(out, "}}\n");
}

/* In one piece, so that it does not flicker; a terminal is overwritten line by line. */
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
		kz_die(KZ_BROKEN, "cannot write: %s", strerror(errno));
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{ "once", no_argument, NULL, 'o' },
		{ "interval", required_argument, NULL, 'i' },
		{ "count", required_argument, NULL, 'c' },
		{ "json", no_argument, NULL, 'j' },
		{ "root", required_argument, NULL, 'r' },
		{ "help", no_argument, NULL, 'h' },
		{ NULL, 0, NULL, 0 },
	};
	static struct snapshot looks[2];
	struct snapshot *before = NULL, *now = &looks[0];
	unsigned long interval = 0, count = 0, shown = 0;
	bool once = false, as_json = false, screen;
	int opt;

	kz_program = "zeropages";
	page_size = (uint64_t)sysconf(_SC_PAGESIZE);
	while ((opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (opt) {
		case 'o':
			once = true;
			break;
		case 'i':
			interval = kz_number("--interval", optarg, 1, 3600);
			break;
		case 'c':
			count = kz_number("--count", optarg, 1, ULONG_MAX);
			break;
		case 'j':
			as_json = true;
			break;
		case 'r':
			root = optarg;
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
		kz_die(KZ_USAGE, "unexpected argument '%s'; see --help", argv[optind]);
	if (once && count)
		kz_die(KZ_USAGE, "--once and --count exclude each other");
	screen = isatty(1) && !once && !as_json;

	look(now);
	if (once && interval) {
		sleep((unsigned int)interval);
		before = now;
		now = &looks[1];
		look(now);
	}
	if (!interval)
		interval = 2;
	if (screen)
		fputs("\033[2J", stdout);
	for (;;) {
		char *text = NULL;
		size_t size;
		FILE *out = open_memstream(&text, &size);

		if (!out)
			kz_die(KZ_BROKEN, "out of memory");
		(as_json ? json : show)(out, now, before);
		fclose(out);
		if (shown && !screen && !as_json)
			putchar('\n');
		put(text, screen);
		free(text);
		shown++;
		if (once || shown == count)
			return KZ_OK;
		sleep((unsigned int)interval);
		before = now;
		now = now == &looks[0] ? &looks[1] : &looks[0];
		look(now);
	}
}
