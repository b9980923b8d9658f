// SPDX-License-Identifier: GPL-2.0
/*
 * conform: checks each memory balloon of the machine that it runs on, and prints a Markdown table.
 *
 * First the kernel's own driver reports memory and uses it again. Then this program is the driver: it sets the queues up
 * in huge pages and talks to the device, for which the device must be on virtio-pci. DEVn.m is the number of a
 * statement in spec/implementations.md. `kz conform` runs it on any VMM.
 */
#include "balloon_pci.h"

#include <dirent.h>
#include <signal.h>
#include <sys/reboot.h>
#include <sys/syscall.h>

#ifndef SYS_kexec_file_load
#define SYS_kexec_file_load -1		/* i386 has none: ENOSYS */
#endif
#define DIRT 0x5a
#define WATCHED_MS 2000			/* for the host to look at its memory */
#define NO_PFN 0xfffffff0u		/* beyond the memory of any guest here */
#define MAX_LIST 256			/* pages in one request */
#define LATE "no answer within 3 s"
#define AGAIN "reboot by kexec in the middle of reports"
#define BY_HAND "queues, lengths and bitmaps one by one"
#define ALL ~0ULL
#define VIRTIO "/sys/bus/virtio/devices"
#define DRIVER "/sys/bus/virtio/drivers/virtio_balloon"
#define VERIFY "/sys/module/page_zeroed/parameters/verify"
#define FLUSH "/sys/kernel/mm/page_reporting/flush"
#define DELAY "/sys/module/page_reporting/parameters/page_reporting_delay_ms"

static const char usage[] =
"usage: conform [options]\n"
"Checks the memory balloons of this machine and prints a Markdown table: PASS, FAIL, NOT OFFERED by the\n"
"device, or NOT RUN. Takes the balloon from the kernel's driver: run it in a guest made for it.\n"
"  --help  this text\n"
"Exit: 0 no check failed, 1 a check failed, 2 bad usage, 3 there is no balloon, or the guest cannot run it.\n";

enum verdict { PASS, FAIL, NOT_OFFERED, NOT_RUN };

static int failures;
static bool distrusted;			/* the kernel trusts no device after a lie */
static bool watched;			/* the host measures the next report */
static char text[256];			/* the observation of a check */

static void row(enum verdict verdict, const char *check, const char *seen)
{
	static const char *const words[] = { "PASS", "FAIL", "NOT OFFERED", "NOT RUN" };

	printf("| %s | %s | %s |\n", check, words[verdict], seen);
	fflush(stdout);
	failures += verdict == FAIL;
}

static const char *__attribute__((format(printf, 1, 2))) says(const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	return text;
}

/* Fills a block with dirt and reports it. */
static int64_t report(struct device *d, unsigned char *at, size_t size)
{
	memset(at, DIRT, size);
	return ask(d, REPORTING, &(struct part){ at, size, true }, 1);
}

/* Inflates or deflates; @room: bytes for the bitmap, which the caller has filled. */
static int64_t page_list(struct device *d, enum queue q, uint32_t *list, int count, void *bitmap, size_t room)
{
	const struct part parts[] = { { list, (size_t)count * 4, false }, { bitmap, room, true } };

	return ask(d, q, parts, room ? 2 : 1);
}

/* Inflates or deflates @count pages from @at on, without a bitmap. */
static bool in_balloon(struct device *d, enum queue q, const unsigned char *at, uint32_t count)
{
	uint32_t *list = small(0);

	for (uint32_t n = 0; n < count; n++)
		list[n] = (uint32_t)(address_of(at) >> 12) + n;
	return page_list(d, q, list, (int)count, NULL, 0) >= 0;
}

/* ---- the checks: each returns the defect, or NULL, and leaves its observation in text ---- */

static bool is_dirt(const unsigned char *at, size_t size)
{
	return at[0] == DIRT && !memcmp(at, at + 1, size - 1);
}

/* A used length that must be 0. */
static const char *nothing(int64_t used)
{
	const char *seen = says("used length %" PRId64 "%s", used, used < 0 ? ": no answer" : "");

	return used ? seen : NULL;
}

/* The answer to a report of dirty memory, with bit 6. */
static const char *answer(const struct device *d, const unsigned char *at, size_t size, int64_t used)
{
	size_t bad;

	if (used < 0)
		return LATE;
	if (!used || !(d->features & BIT(INIT_REPORTED)))
		return NULL;
	if ((size_t)used == size / 4096)
		return says("used length %" PRId64 " for %zu bytes is a number of pages: bit 6 means something else here", used, size);
	if ((size_t)used != size)
		return says("used length %" PRId64 " for %zu bytes: it must be all or 0", used, size);
	bad = kz_first_nonzero(at, size);
	return bad == size ? NULL : says("%zu bytes returned as zero, but byte %zu is 0x%02x%s", size, bad, at[bad],
					 is_dirt(at, size) ? ": nothing was discarded" : "");
}

static const char *config(struct device *d)
{
	bool poison = d->features & BIT(VIRTIO_BALLOON_F_PAGE_POISON);
	uint32_t target = d->config[0], size = poison ? 16 : 8, read[4] = { 0 };

	d->config[1] = 17;
	if (poison)
		d->config[3] = 0x01020304;
	for (uint32_t i = 0; i < d->config_size / 4 && i < 4; i++)
		read[i] = d->config[i];
	d->config[1] = 0;
	if (poison)
		d->config[3] = 0;
	says("%u bytes: num_pages %u, was %u; actual %u, written 17; poison_val 0x%x%s", d->config_size, read[0], target, read[1],
	     read[3], poison ? ", written 0x1020304" : "");
	return d->config_size < size || read[0] != target || read[1] != 17 || (poison && read[3] != 0x01020304) ? text : NULL;
}

static const char *works(struct device *d)
{
	if (!in_balloon(d, INFLATE, block(0), 1) || !in_balloon(d, DEFLATE, block(0), 1))
		return "inflate or deflate is not answered";
	return d->rings[REPORTING].size ? answer(d, block(1), KZ_HUGE, report(d, block(1), KZ_HUGE)) : NULL;
}

static const char *queues(struct device *d)
{
	const uint64_t offered = d->offered & (NEEDS_STATS | NEEDS_HINTING | NEEDS_REPORTING);
	const char *error = NULL;
	uint64_t set = offered;
	int sets = 0;

	/* Subsets of the offered features, each once, from all to none. */
	do {
		error = start(d, ~offered | set, MAX_RING);
		if (!error)
			error = works(d);
		sets++;
		set = (set - 1) & offered;
	} while (!error && set != offered);
	if (error)
		return says("%.160s, with features 0x%" PRIx64, error == text ? strdup(error) : error, d->features & 0xff);
	says("%d subsets", sets);
	return NULL;
}

static const char *rings(struct device *d)
{
	uint16_t most = d->rings[INFLATE].size;
	const char *error = start(d, ALL, 2);

	if (!error)
		error = works(d);
	if (!error)
		says("%u entries, and 2", most);
	return error;
}

static const char *reported_zero(struct device *d)
{
	static const size_t sizes[] = { 4096, 65536, KZ_HUGE };
	const char *error = NULL;
	int64_t used = 0, claimed = 0;

	for (int i = 0; i < 3 && !error; i++) {
		used = report(d, block(0), sizes[i]);
		error = answer(d, block(0), sizes[i], used);
		claimed += used;
	}
	if (!error)
		says(claimed ? "4 KiB, 64 KiB and 2 MiB: %" PRId64 " bytes zero" : "the device makes no statement", claimed);
	return error;
}

static const char *only_that(struct device *d)
{
	unsigned char *at = block(0), *middle = at + KZ_HUGE / 2;

	memset(at, DIRT, KZ_HUGE);
	if (report(d, middle, 65536) < 0)
		return LATE;
	if (!is_dirt(at, KZ_HUGE / 2) || !is_dirt(middle + 65536, KZ_HUGE / 2 - 65536))
		return "memory beside the block has changed";
	memset(middle, DIRT, 65536);
	wait_ms(100);
	return is_dirt(middle, 65536) ? NULL : "memory was discarded after the report was answered";
}

/* Several reports, the first block twice, and an inflate request meanwhile. */
static const char *at_once(struct device *d)
{
	struct ring *r = &d->rings[REPORTING];
	size_t many = r->size < 16 ? r->size - 1 : 16, i, n;
	const char *error = NULL;
	uint32_t *list = small(0);

	memset(block(0), DIRT, many * KZ_HUGE);
	list[0] = (uint32_t)(address_of(block(0)) >> 12);
	give(&d->rings[INFLATE], &(struct part){ list, 4, false }, 1);
	for (i = 0; i <= many; i++)
		give(r, &(struct part){ block(i % many), KZ_HUGE, true }, 1);
	for (i = 0; i <= many && !error; i++) {
		int64_t used = take(r, PATIENCE);

		/* The number of the buffer: each has one descriptor. */
		n = r->used->ring[(uint16_t)(r->taken - 1) % r->size].id % many;
		error = answer(d, block(n), KZ_HUGE, used);
	}
	if (!error && take(&d->rings[INFLATE], PATIENCE) < 0)
		error = "the inflate request is not answered";
	return error;
}

static const char *without_bit6(struct device *d)
{
	return nothing(report(d, block(0), KZ_HUGE));
}

static const char *readable(struct device *d)
{
	return nothing(ask(d, REPORTING, (const struct part[]){ { block(0), 4096, false }, { block(0) + 4096, 4096, true } }, 2));
}

static const char *poisoned(struct device *d)
{
	const char *error;

	d->config[3] = 0xaaaaaaaa;
	error = nothing(report(d, block(0), KZ_HUGE));
	d->config[3] = 0;
	return error;
}

/* One inflate request of @count pages, of which the last is not memory if there are several. */
static const char *inflate(struct device *d, int count, int *zeros)
{
	size_t length = (size_t)(count + 7) / 8, i;
	unsigned char *bitmap = small(8192), *at = block(2), zero[32] = { 0 }, turned[32] = { 0 };
	uint32_t *list = small(0);
	bool written = false;
	int64_t used;
	int n;

	memset(at, DIRT, KZ_HUGE);
	memset(bitmap, 0xff, 64);
	for (n = 0; n < count; n++)
		list[n] = n + 1 < count || count == 1 ? (uint32_t)(address_of(at) >> 12) + (uint32_t)n : NO_PFN;
	used = page_list(d, INFLATE, list, count, bitmap, length);
	if (used < 0 || page_list(d, DEFLATE, list, count, NULL, 0) < 0)
		return LATE;
	if (used && (size_t)used != length)
		return says("used length %" PRId64 " for %d pages: it must be %zu or 0", used, count, length);
	for (n = 0; used && n < count; n++) {
		bool clean = list[n] != NO_PFN && kz_first_nonzero(at + (size_t)n * 4096, 4096) == 4096;

		zero[n / 8] |= clean << n % 8;
		turned[n / 8] |= clean << (7 - n % 8);
		written |= bitmap[n / 8] != 0xff;
	}
	for (i = 0; i < (size_t)used; i++) {
		*zeros += __builtin_popcount(bitmap[i]);
		if (!(bitmap[i] & ~zero[i]))
			continue;
		if (!written)
			return "the bitmap was not written: its bits are as the driver left them";
		return says("byte %zu of the bitmap is 0x%02x, the pages that are zero make 0x%02x%s", i, bitmap[i], zero[i],
			    bitmap[i] == turned[i] ? ": it begins with the most significant bit" : "");
	}
	return NULL;
}

static const char *inflated_zero(struct device *d)
{
	static const int counts[] = { 4, 1, 8, 9, 256 };
	const char *error = NULL;
	int zeros = 0;

	for (int i = 0; i < 5 && !error; i++)
		error = inflate(d, counts[i], &zeros);
	if (!error)
		says("%d of 274 pages zero", zeros);
	return error;
}

static int64_t sixteen_pages(struct device *d, size_t room)
{
	uint32_t *list = small(0);

	for (uint32_t i = 0; i < 16; i++)
		list[i] = (uint32_t)(address_of(block(2)) >> 12) + i;
	return page_list(d, INFLATE, list, 16, small(8192), room);
}

static const char *no_room(struct device *d)
{
	return nothing(sixteen_pages(d, 1));
}

static const char *without_bit7(struct device *d)
{
	return nothing(sixteen_pages(d, 2));
}

static const char *half(struct device *d)
{
	for (enum queue q = INFLATE; q <= DEFLATE; q++)
		for (size_t i = 2; i < pages * 2; i++)
			if (!in_balloon(d, q, pool + i * MAX_LIST * 4096, MAX_LIST))
				return LATE;
	memset(block(0), DIRT, (pages - 1) * KZ_HUGE);
	wait_ms(200);
	says("%zu MiB", (pages - 1) * 2);
	return is_dirt(block(0), (pages - 1) * KZ_HUGE) ? NULL : "deflated memory does not keep its data";
}

/* Out of memory, a driver uses pages of the balloon at once, and deflates later, whatever the target. */
static const char *used_first(struct device *d)
{
	if (!in_balloon(d, INFLATE, block(4), MAX_LIST))
		return LATE;
	memset(block(4), DIRT, MAX_LIST * 4096);
	wait_ms(100);
	if (!in_balloon(d, DEFLATE, block(4), MAX_LIST))
		return LATE;
	wait_ms(100);
	return is_dirt(block(4), MAX_LIST * 4096) ? NULL : "data written before the deflate request is lost";
}

static const char *statistics(struct device *d)
{
	struct virtio_balloon_stat *stat = small(0);
	int64_t used = 0;

	*stat = (struct virtio_balloon_stat){ VIRTIO_BALLOON_S_MEMFREE, 1 << 20 };
	for (int i = 0; i < 3 && !used; i++) {
		give(&d->rings[STATS], &(struct part){ stat, sizeof(*stat), false }, 1);
		used = take(&d->rings[STATS], 700);
	}
	says(used ? "the device keeps the buffer until the host asks" : "the host asks all the time");
	return used > 0 ? "the device wrote into a buffer that it may only read" : NULL;
}

static const char *hinting(struct device *d)
{
	uint32_t *command = small(0);

	command[0] = VIRTIO_BALLOON_CMD_ID_DONE;
	says("command %u of the device", d->config[2]);
	return ask(d, HINTING, (const struct part[]){ { command, 4, false }, { block(3), 4096, true } }, 2) < 0 ?
	       "a hint is not answered" : NULL;
}

/* Nothing may be outstanding after a reset, whatever the last driver wrote. The host sends no command meanwhile. */
static const char *report_now(struct device *d)
{
	volatile uint32_t *const command = &d->config[4], *const done = &d->config[5];
	const char *error = NULL;

	if (d->config_size < 24)
		return says("%u bytes of configuration space, 24 are needed", d->config_size);
	for (int i = 0; i < 2 && !error; i++) {
		if (*command == UINT32_MAX)
			return "the numbers read as all ones: the configuration space ends before them";
		if (*command != *done)
			return says("command %u is outstanding after a reset, %u is done", *command, *done);
		*done = *command + 1;
		error = start(d, ALL, MAX_RING);
	}
	if (!error)
		error = works(d);
	if (!error)
		says("command %u, none is outstanding", *command);
	return error;
}

static const char *reset_between(struct device *d)
{
	struct ring *r = &d->rings[REPORTING];
	size_t many = pages - 1 < r->size ? pages - 1 : r->size, i;
	const char *error;

	if (!in_balloon(d, INFLATE, block(0), MAX_LIST))
		return LATE;
	for (i = 0; i < many; i++)
		give(r, &(struct part){ block(i), KZ_HUGE, true }, 1);
	kick(r);
	if (!reset(d))
		return "the device does not leave its reset";
	memset(block(0), DIRT, many * KZ_HUGE);
	wait_ms(300);
	if (!is_dirt(block(0), many * KZ_HUGE))
		return "memory was discarded after the reset";
	error = start(d, ALL, MAX_RING);
	return error ? error : works(d);
}

static const char *packed(struct device *d)
{
	const char *error;

	d->packed = true;
	error = start(d, ALL, MAX_RING);
	if (!error)
		error = works(d);
	if (!error && d->offered & BIT(INIT_REPORTED))
		error = reported_zero(d);
	if (!error && d->offered & BIT(INIT_ON_INFLATE))
		error = inflated_zero(d);
	d->packed = false;
	return error;
}

static const struct check {
	const char *name;
	uint64_t needs, declined;	/* feature bits */
	const char *(*run)(struct device *d);
} checks[] = {
	{ "configuration space", 0, 0, config },
	{ "each subset of queues", 0, 0, queues },
	{ "ring sizes", 0, 0, rings },
	{ "reported memory reads as zero (DEV6.2, 6.4)", BIT(INIT_REPORTED), 0, reported_zero },
	{ "only the block, only until the answer", NEEDS_REPORTING, 0, only_that },
	{ "reports at once, one twice, an inflate request (DEV6.3)", NEEDS_REPORTING, 0, at_once },
	{ "reset in the middle of reports, with pages in the balloon", NEEDS_REPORTING, 0, reset_between },
	{ "bit 6 declined (DEV6.12)", BIT(INIT_REPORTED), BIT(INIT_REPORTED), without_bit6 },
	{ "a report with readable parts (DEV6.9)", BIT(INIT_REPORTED), 0, readable },
	{ "poison (DEV6.7)", BIT(INIT_REPORTED) | BIT(VIRTIO_BALLOON_F_PAGE_POISON), 0, poisoned },
	{ "no report on request is outstanding (DEV16.7)", BIT(REPORT_NOW), 0, report_now },
	{ "inflated pages read as zero (DEV7.1, 7.5, 7.10)", BIT(INIT_ON_INFLATE), 0, inflated_zero },
	{ "a bitmap without room (DEV7.3)", BIT(INIT_ON_INFLATE), 0, no_room },
	{ "bit 7 declined (DEV7.14)", BIT(INIT_ON_INFLATE), BIT(INIT_ON_INFLATE), without_bit7 },
	{ "half of the memory into the balloon and back", 0, 0, half },
	{ "out of memory: pages used before they are deflated", BIT(VIRTIO_BALLOON_F_DEFLATE_ON_OOM),
	  BIT(VIRTIO_BALLOON_F_MUST_TELL_HOST), used_first },
	{ "statistics", NEEDS_STATS, 0, statistics },
	{ "free page hinting", NEEDS_HINTING, 0, hinting },
	{ "packed rings", BIT(VIRTIO_F_RING_PACKED), 0, packed },
};

/* Returns whether there is a modern one. */
static bool check_interfaces(struct device *d)
{
	const uint64_t zeros = BIT(INIT_REPORTED) | BIT(INIT_ON_INFLATE);
	bool modern = find(d);
	const char *error;

	if (!d->id) {
		row(NOT_RUN, BY_HAND, "the device is not on virtio-pci");
		return false;
	}
	row(modern ? PASS : d->common ? FAIL : NOT_OFFERED, "modern interface",
	    says("device 0x%04x%s", d->id, d->common && !modern ? " without VIRTIO_F_VERSION_1" : ""));
	if (d->ports < 0) {
		row(NOT_OFFERED, "legacy interface", "no ports");
		return modern;
	}
	if (!modern)
		d->offered = in(d, VIRTIO_PCI_HOST_FEATURES, 4);
	error = start_legacy(d);
	if (!error)
		error = works(d);
	/* A transitional device has one set of bits for both. */
	if (!error && !modern && d->offered & zeros)
		error = says("bit%s without VIRTIO_F_VERSION_1: no driver may accept that (DRV6.13, DRV7.15)",
			     !(~d->offered & zeros) ? "s 6 and 7" : d->offered & BIT(INIT_REPORTED) ? " 6" : " 7");
	row(error ? FAIL : PASS, "legacy interface", error ? error : modern ? "transitional device" : "legacy device");
	out(d, VIRTIO_PCI_STATUS, 1, 0);
	if (!modern)
		row(NOT_RUN, BY_HAND, "they need the modern interface");
	return modern;
}

static void check_device(struct device *d)
{
	char list[128] = "";
	const char *error;
	size_t i;
	int bit;

	if (!check_interfaces(d))
		return;
	for (bit = 0; bit < 64; bit++)
		if (d->offered & BIT(bit))
			snprintf(list + strlen(list), sizeof(list) - strlen(list), " %d", bit);
	error = d->offered & NEEDS_REPORTING ? "offered:" :
		d->offered & BIT(INIT_REPORTED) ? "bit 6 without bit 5:" :
		d->offered & BIT(REPORT_NOW) ? "bit 16 without bit 5:" : "offered:";
	row(*error == 'b' ? FAIL : PASS, "feature bits (DEV6.1, 16.1)", says("%s%s", error, list));
	for (i = 0; i < sizeof(checks) / sizeof(checks[0]); i++) {
		const struct check *c = &checks[i];
		uint64_t absent = c->needs & ~d->offered;

		text[0] = '\0';
		if (absent) {
			row(NOT_OFFERED, c->name, says("bit %d", __builtin_ctzll(absent)));
			continue;
		}
		/* The poison value is 0 unless a check sets it. */
		error = start(d, ~c->declined, MAX_RING);
		if (!error)
			error = c->run(d);
		row(error ? FAIL : PASS, c->name, error ? error : text);
	}
	reset(d);
}

/* ---- the kernel's own driver ---- */

/* A child fills memory with dirt (@dirty), or reads new memory, which must be zero. */
static bool child(size_t bytes, bool dirty)
{
	pid_t pid = kz_fork();

	if (!pid) {
		unsigned char *mem = kz_map(bytes, 0);

		if (dirty) {
			memset(mem, DIRT, bytes);
			printf("conform: dirty\n");
			fflush(stdout);
			/* The host looks at its memory. */
			wait_ms(watched ? WATCHED_MS : 0);
			_exit(0);
		}
		madvise(mem, bytes, MADV_POPULATE_WRITE);
		_exit(kz_first_nonzero(mem, bytes) < bytes);
	}
	return !kz_wait(pid, NULL);
}

static uint64_t counter(const char *name)
{
	static struct kz_vmstat v;
	uint64_t value = 0;

	kz_vmstat_read(&v);
	kz_vmstat_get(&v, name, &value);
	return value;
}

/* Memory is filled with dirt, freed, reported and used again; @verify: the kernel checks the memory that it does not zero. */
static bool check_round(const char *check, bool verify)
{
	/* The child uses more memory than stayed clean, so some of it was dirty. */
	size_t bytes = kz_meminfo("MemFree") / 4 * 3, used = bytes / 3 * 2;
	uint64_t bad, skip, cleared;
	bool filled, clean;
	int error;

	if (distrusted) {
		row(NOT_RUN, check, "the kernel found dirty pages and distrusts all devices");
		return false;
	}
	kz_write_file(VERIFY, verify ? "1" : "0");
	filled = child(bytes, true);
	error = kz_write_file(FLUSH, "0");
	if (!error)
		printf("conform: reported %zu\n", bytes);
	fflush(stdout);
	wait_ms(watched ? WATCHED_MS : 0);
	watched = false;
	bad = counter("pgzeroed_bad");
	skip = counter("pgzeroed_skip");
	cleared = counter("pgzeroed_cleared");
	clean = child(used, false);
	bad = counter("pgzeroed_bad") - bad;
	skip = counter("pgzeroed_skip") - skip;
	cleared = counter("pgzeroed_cleared") - cleared;
	kz_write_file(VERIFY, "1");
	if (error == -ENODEV)
		row(NOT_OFFERED, check, "bit 5");
	else if (error || !filled)
		row(NOT_RUN, check, error ? strerror(-error) : "memory is short");
	else if (bad || !clean)
		row(FAIL, check, says("%s; the kernel found %" PRIu64 " dirty pages", clean ? "new memory is zero" : "new memory is not zero", bad));
	else
		row(PASS, check, says("%zu MiB were used again, %.1f %% of the zeroing skipped", used / (size_t)KZ_MB,
				      100.0 * (double)skip / (double)(skip + cleared + !(skip + cleared))));
	distrusted = bad;
	return !error && !bad && clean;
}

static void check_driver(const char *name)
{
	int i, rounds = 0;
	pid_t pid;

	watched = true;
	if (kz_write_file(DRIVER "/bind", name)) {
		row(FAIL, "the kernel's driver", "it cannot be bound to the device");
		return;
	}
	/* Unchecked, dirt could be a page table. */
	if (check_round("reported memory, checked by the kernel", true))
		check_round("reported memory, read by a program", false);
	pid = kz_fork();
	if (!pid)
		for (;;)
			kz_write_file(FLUSH, "0");
	for (i = 0; i < 3; i++) {
		wait_ms(100);
		rounds += !kz_write_file(DRIVER "/unbind", name) && !kz_write_file(DRIVER "/bind", name);
	}
	kill(pid, SIGKILL);
	kz_wait(pid, NULL);
	row(rounds == 3 ? PASS : FAIL, "driver unbound in the middle of reports", says("%d of 3 times", rounds));
	check_round("reported memory, after that", true);
	kz_write_file(DRIVER "/unbind", name);
}

/* Starts the kernel again, with this program, which continues the table. Returns if that is not possible. */
static void start_again(const struct device *d)
{
	KZ_FD kernel = open("/kz/kernel", O_RDONLY | O_CLOEXEC), initrd = open("/sys/firmware/initrd", O_RDONLY | O_CLOEXEC);
	char line[2200];
	ssize_t length = kz_read_file("/proc/cmdline", line, sizeof(line) - 100);

	if (kernel < 0 || initrd < 0) {
		row(NOT_RUN, AGAIN, "/kz/kernel and, with retain_initrd, /sys/firmware/initrd are needed");
		return;
	}
	munmap(pool, pages * KZ_HUGE);
	kz_write_file(POOL, "0");
	/* The memory that the kernel loads into is dirty, too. */
	child(kz_meminfo("MemFree") / 4 * 3, true);
	/* No report before the probe wants it. */
	snprintf(line + length, 100, " page_reporting.page_reporting_delay_ms=3600000 conform=%d", failures);
	if (syscall(SYS_kexec_file_load, kernel, initrd, strlen(line) + 1, line, 0)) {
		row(NOT_RUN, AGAIN, says("kexec_file_load(2): %s", strerror(errno)));
		return;
	}
	kz_write_file(DRIVER "/bind", d->name);
	child(kz_meminfo("MemFree") / 4 * 3, true);
	printf("conform: kexec\n");
	if (!kz_fork())
		for (;;)
			kz_write_file(FLUSH, "0");
	wait_ms(100);
	reboot(RB_KEXEC);
	row(FAIL, AGAIN, strerror(errno));
}

/*
 * The second kernel. @bound: its driver has started the device. With bit 6 it has reported its memory by itself. A device that
 * answers reports of the first kernel now would make dirty pages known zero.
 */
static void check_again(const struct device *d, bool bound)
{
	uint64_t bad;
	bool clean;

	if (!bound || kz_write_file(DRIVER "/bind", d->name)) {
		row(FAIL, AGAIN, "the second kernel's driver does not start the device");
		return;
	}
	kz_write_file(VERIFY, "1");
	clean = child(kz_meminfo("MemFree") / 2, false);
	bad = counter("pgzeroed_bad");
	if (bad || !clean)
		row(FAIL, AGAIN, says("%s; the kernel found %" PRIu64 " dirty pages",
				      clean ? "new memory is zero" : "new memory is not zero", bad));
	else
		check_round(AGAIN, true);
}

int main(int argc, char **argv)
{
	static struct device devices[16];
	char line[2200] = "", *again;
	struct dirent **entries;
	int found, count = 0, i;
	bool bound = false;

	kz_only_options(argc, argv, "conform", usage, (const struct kz_option[]){ { 0 } });
	/* The kernel's messages would be in the middle of the table. */
	kz_write_file("/proc/sys/kernel/printk", "1");
	kz_write_file(DELAY, "3600000");
	found = scandir(VIRTIO, &entries, NULL, versionsort);
	for (i = 0; i < found && count < 16; i++) {
		struct device *d = &devices[count];
		char path[512], id[16];

		snprintf(path, sizeof(path), VIRTIO "/%.31s/device", entries[i]->d_name);
		if (kz_read_file(path, id, sizeof(id)) <= 0 || strtoul(id, NULL, 16) != 5)
			continue;
		snprintf(d->name, sizeof(d->name), "%.31s", entries[i]->d_name);
		*strrchr(path, '/') = '\0';
		if (!realpath(path, d->pci))
			continue;
		*strrchr(d->pci, '/') = '\0';
		/* Reports go to one device at a time. */
		bound = !kz_write_file(DRIVER "/unbind", d->name) || count;
		count++;
	}
	if (!count)
		kz_die(KZ_BROKEN, "no virtio device of type 5: the machine has no balloon; add one to the VMM's options");
	kz_read_file("/proc/cmdline", line, sizeof(line));
	again = strstr(line, " conform=");
	if (again) {
		failures = atoi(strchr(again, '=') + 1);
		check_again(&devices[count - 1], bound);
	}
	for (i = 0; i < count && !again; i++) {
		printf("\nconform: device %s\n\n| check | result | seen |\n|---|---|---|\n", strrchr(devices[i].pci, '/') + 1);
		check_driver(devices[i].name);
		if (!pool && !take_pool())
			row(NOT_RUN, BY_HAND, says("%zu huge pages, 8 are needed", pages));
		else
			check_device(&devices[i]);
	}
	if (!again)
		start_again(&devices[count - 1]);
	printf("\nconform: end, %d failed\n", failures);
	return failures ? KZ_FAILED : KZ_OK;
}
