// SPDX-License-Identifier: GPL-2.0
/*
 * Does the page allocator know which free memory is zero?
 *
 * The functions that decide it, taken out of mm/, are called in random order by
 * everybody who handles free blocks: those who allocate and free, the per-CPU
 * lists, page reporting, compaction, isolation, contiguous allocation, memory
 * failure and hibernation. A model beside them has the content of each page, and
 * who has vouched for it. After each step:
 *
 *  - a block that is known to be zero is zero, to its last page;
 *  - only the heads of free blocks are marked, no allocated page is;
 *  - nothing is lost: a block all of whose pages were vouched for is known to be
 *    zero, by all who did, and no other block is;
 *  - every page has exactly one place, and the free lists have all free blocks.
 */
#include "shim.h"

#include <stdarg.h>
#include <sys/wait.h>
#include <unistd.h>

#include "page_zeroed.h"

struct page mem_map[NR_PAGES];
struct zone the_zone;
int block_type[NR_PAGES >> pageblock_order];
bool block_isolated[NR_PAGES >> pageblock_order];
unsigned long vm_events[NR_VM_EVENT_ITEMS];
unsigned int guard_minorder;
bool trylock_fails;
DEFINE_STATIC_KEY_FALSE(page_zeroed_active) = { true };
static bool page_zeroed_ready = true;
DEFINE_STATIC_KEY_FALSE(page_zeroed_verify_enabled) = { false };
DEFINE_STATIC_KEY_FALSE(page_reporting_enabled) = { true };

static unsigned long page_zeroed_distrusted;
static struct task_struct task;
struct task_struct *current = &task;

#include "functions.h"
#line 44 "main.c"

void __page_zeroed_verify(struct page *page, unsigned int order,
			  unsigned int sources)
{
}

/* Whose is a page? */
enum kind {
	FREE,		/* the buddy allocator's */
	CACHED,		/* on a per-CPU list */
	HELD,		/* isolated by somebody who will put it back */
	QUEUED,		/* freed by free_frozen_pages_nolock(), not yet there */
	ALLOCATED,
	TAKEN_OFF,	/* gone bad */
};

static const char * const kind_names[] = {
	"free", "cached", "held", "queued", "allocated", "taken off",
};

/* The model: a page each */
static unsigned char dirt[NR_PAGES];		/* content, 0: all zeros */
static unsigned char vouched[NR_PAGES];		/* for its being zero, by whom */
static bool reported[NR_PAGES];			/* is it known to the device? */
static enum kind kind[NR_PAGES];
static unsigned char order_of[NR_PAGES];	/* of the block it heads */

/* The blocks, as of the last check */
static unsigned int blocks[NR_PAGES], nr_blocks;

/*
 * A round is a list of steps. Each draws its random numbers from the round's
 * seed and its own position, so that a step can be left out and the others stay
 * what they are, as far as the state lets them.
 */
#define STEPS	300

static bool skip[STEPS];
static bool quiet;
static char trace[STEPS][96];
static unsigned int step;
static unsigned long round_seed;
static unsigned long random_state;

static unsigned int rnd(unsigned int n)
{
	/* splitmix64 */
	unsigned long z = (random_state += 0x9e3779b97f4a7c15UL);

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9UL;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebUL;
	return ((z ^ (z >> 31)) >> 16) % n;
}

static void seed_step(unsigned int i)
{
	random_state = round_seed * 0xd1342543de82ef95UL + i * 0xaf251af3b0f025b5UL;
	rnd(1);
}

static void __attribute__((format(printf, 1, 2))) say(const char *fmt, ...)
{
	size_t used = strlen(trace[step]);
	va_list args;

	va_start(args, fmt);
	vsnprintf(trace[step] + used, sizeof(trace[step]) - used, fmt, args);
	va_end(args);
}

void broken(const char *fmt, ...)
{
	va_list args;
	unsigned int i;

	if (quiet)
		_exit(1);

	for (i = 0; i <= step && i < STEPS; i++) {
		if (trace[i][0])
			printf("%4u %s\n", i, trace[i]);
	}
	printf("BROKEN after step %u of seed %lu: ", step, round_seed);
	va_start(args, fmt);
	vprintf(fmt, args);
	va_end(args);
	printf("\n");
	fflush(stdout);
	_exit(1);
}

static unsigned int all_vouched(unsigned int pfn, unsigned int order)
{
	unsigned int i, sources = 0;

	for (i = pfn; i < pfn + (1U << order); i++) {
		if (!vouched[i])
			return 0;
		sources |= vouched[i];
	}
	return sources;
}

static bool all_zero(unsigned int pfn, unsigned int order)
{
	unsigned int i;

	for (i = pfn; i < pfn + (1U << order); i++) {
		if (dirt[i])
			return false;
	}
	return true;
}

static void set_pages(unsigned int pfn, unsigned int order, enum kind k)
{
	unsigned int i;

	for (i = pfn; i < pfn + (1U << order); i++)
		kind[i] = k;
	order_of[pfn] = order;
}

static void vouch(unsigned int pfn, unsigned int order, unsigned int sources)
{
	memset(vouched + pfn, sources, 1U << order);
}

static void fill(unsigned int pfn, unsigned int order, unsigned char c)
{
	memset(dirt + pfn, c, 1U << order);
}

/* One block, of which the allocator or one of its friends has the head. */
static void check_mark(unsigned int pfn, unsigned int order, bool guard)
{
	struct page *page = pfn_to_page(pfn);
	unsigned int is = page_zeroed_sources(page);
	unsigned int should = guard ? 0 : all_vouched(pfn, order);

	if (PageZeroed(page) && !is)
		broken("pfn %u is marked, by nobody", pfn);
	if (is && !all_zero(pfn, order))
		broken("pfn %u, order %u: known zero, and is not", pfn, order);
	if (is != should)
		broken("pfn %u, order %u: vouched for by %#x, should be %#x",
		       pfn, order, is, should);

	/* What is known of a part is lost in a block of which it is not. */
	vouch(pfn, order, should);
}

static void check_lists(unsigned int nr_buddies)
{
	unsigned int order, mt, nr = 0;

	for (order = 0; order < NR_PAGE_ORDERS; order++) {
		struct free_area *area = &the_zone.free_area[order];
		unsigned long nr_free = 0;

		for (mt = 0; mt < MIGRATE_TYPES; mt++) {
			struct page *page;

			list_for_each_entry(page, &area->free_list[mt], buddy_list) {
				unsigned int pfn = page_to_pfn(page);

				if (!PageBuddy(page) || buddy_order(page) != order ||
				    kind[pfn] != FREE)
					broken("pfn %u is %s, on the free list of order %u",
					       pfn, kind_names[kind[pfn]], order);
				if (get_pageblock_migratetype(page) != (int)mt)
					broken("pfn %u is of type %d, on the free list of type %u",
					       pfn, get_pageblock_migratetype(page), mt);
				nr_free++;
			}
		}
		if (nr_free != area->nr_free)
			broken("order %u has %lu free blocks, counted as %lu",
			       order, nr_free, area->nr_free);
		nr += nr_free;
	}
	if (nr != nr_buddies)
		broken("%u blocks are free, %u on the free lists", nr_buddies, nr);
}

static void check(void)
{
	unsigned int pfn, i, order, nr_buddies = 0;
	long nr_zeroed = 0;

	nr_blocks = 0;
	for (pfn = 0; pfn < NR_PAGES; pfn += 1U << order) {
		struct page *page = pfn_to_page(pfn);
		const bool guard = page_is_guard(page);

		blocks[nr_blocks++] = pfn;
		if (kind[pfn] == FREE) {
			if (!PageBuddy(page) && !guard)
				broken("pfn %u is free, and nobody has it", pfn);
			order = buddy_order(page);
			nr_buddies += PageBuddy(page);
		} else {
			if (PageBuddy(page) || guard || PageReported(page))
				broken("pfn %u is %s, and looks free", pfn,
				       kind_names[kind[pfn]]);
			order = order_of[pfn];
		}

		if (order > MAX_PAGE_ORDER || pfn & ((1U << order) - 1))
			broken("pfn %u heads a block of order %u", pfn, order);
		order_of[pfn] = order;

		nr_zeroed += (long)PageZeroed(page) << order;
		if (kind[pfn] < ALLOCATED)
			check_mark(pfn, order, guard);
		else if (PageZeroed(page))
			broken("pfn %u is %s and marked", pfn, kind_names[kind[pfn]]);

		for (i = pfn; i < pfn + (1U << order); i++) {
			struct page *p = pfn_to_page(i);

			if (kind[i] != kind[pfn])
				broken("pfn %u is %s, in a block at %u that is %s", i,
				       kind_names[kind[i]], pfn, kind_names[kind[pfn]]);
			if (PageReported(page) && !reported[i])
				broken("pfn %u is not reported, in a block at %u that is",
				       i, pfn);
			if (i == pfn)
				continue;
			if (PageBuddy(p) || page_is_guard(p))
				broken("pfn %u is free, in a block at %u", i, pfn);
			if (PageZeroed(p) || PageReported(p))
				broken("pfn %u is marked, in a block at %u", i, pfn);
		}
	}
	if (nr_zeroed != the_zone.stat[NR_FREE_ZEROED])
		broken("%ld pages are known zero, counted as %ld", nr_zeroed,
		       the_zone.stat[NR_FREE_ZEROED]);
	check_lists(nr_buddies);
}

/* A random block of some kind, at least of some order; NR_PAGES if none is. */
static unsigned int pick(enum kind k, unsigned int min_order)
{
	unsigned int i, first = rnd(nr_blocks);

	for (i = 0; i < nr_blocks; i++) {
		unsigned int pfn = blocks[(first + i) % nr_blocks];

		/* Some may have gone since the last check. */
		if (kind[pfn] != k || order_of[pfn] < min_order)
			continue;
		if (k == FREE && !PageBuddy(pfn_to_page(pfn)))
			continue;
		return pfn;
	}
	return NR_PAGES;
}

/* The end of every allocation: post_alloc_hook(). */
static void leave(struct page *page, unsigned int order)
{
	const unsigned int pfn = page_to_pfn(page);
	const unsigned int sources = all_vouched(pfn, order);
	const bool wanted = rnd(2);
	unsigned int is, should, i;

	should = wanted && !(sources & page_zeroed_distrusted) ? sources : 0;
	is = page_zeroed_leave(page, order, wanted);
	say("; pfn %u order %u%s", pfn, order, wanted ? " wanted as zeros" : "");

	if (is && !all_zero(pfn, order))
		broken("pfn %u, order %u: handed out as zeros, and is not", pfn, order);
	if (is != should)
		broken("pfn %u, order %u: handed out as zeros by %#x, should be %#x",
		       pfn, order, is, should);
	for (i = pfn; i < pfn + (1U << order); i++) {
		if (PageZeroed(pfn_to_page(i)))
			broken("pfn %u of an allocation at %u is marked", i, pfn);
	}

	if (wanted)
		fill(pfn, order, 0);
	vouch(pfn, order, 0);
	memset(reported + pfn, 0, 1U << order);

	/* Larger ones are freed in pieces. */
	for (i = 0; i < 1U << order; i += 1U << MAX_PAGE_ORDER)
		set_pages(pfn + i, order > MAX_PAGE_ORDER ? MAX_PAGE_ORDER : order,
			  ALLOCATED);
}

/*
 * Take a block of @order or part of a larger one, now and then for somebody who
 * wants zeros. Only he is given the last of a list, and only if it spares the
 * zeroing while the host has the memory still.
 */
static struct page *take_block(unsigned int order, int type)
{
	unsigned int host = BIT(PAGE_ZEROED_REPORTED) | BIT(PAGE_ZEROED_INFLATED);
	bool zeros = rnd(2);
	struct page *want = NULL, *page;
	unsigned int high;

	for (high = order; high <= MAX_PAGE_ORDER && !want; high++) {
		struct list_head *list = &the_zone.free_area[high].free_list[type];
		unsigned int sources;

		if (list_empty(list))
			continue;

		want = list_last_entry(list, struct page, buddy_list);
		sources = page_zeroed_sources(want);
		if (!zeros || !sources || (sources & host))
			want = list_first_entry_or_null(list, struct page, buddy_list);
	}

	page = __rmqueue_smallest(&the_zone, order, type,
				  zeros ? ALLOC_ZEROED : ALLOC_DEFAULT);
	if (page != want)
		broken("order %u%s: not the block that should be taken", order,
		       zeros ? ", zeros" : "");
	return page;
}

static struct page *get_block(unsigned int order)
{
	static const int types[] = {
		MIGRATE_UNMOVABLE, MIGRATE_MOVABLE, MIGRATE_RECLAIMABLE, MIGRATE_CMA,
	};
	unsigned int first = rnd(4), i;
	struct page *page;
	int high;

	page = take_block(order, types[first]);
	if (page || types[first] == MIGRATE_CMA)
		return page;

	/* Take from another type, large blocks first. */
	for (high = MAX_PAGE_ORDER; high >= (int)order; high--) {
		for (i = 1; i < 4; i++) {
			int other = types[(first + i) % 4];

			page = get_page_from_free_area(&the_zone.free_area[high], other);
			if (!page || other == MIGRATE_CMA)
				continue;
			page = try_to_claim_block(&the_zone, page, high, order,
						  types[first], other, 0);
			if (page) {
				say(" claimed from order %d", high);
				return page;
			}
		}
	}
	return NULL;
}

static void do_alloc(void)
{
	unsigned int order = rnd(3) ? rnd(4) : rnd(NR_PAGE_ORDERS);
	struct page *page = get_block(order);

	say("allocate order %u", order);
	if (page)
		leave(page, order);
}

/* Everything that uses the memory before it is freed */
bool __free_pages_prepare(struct page *page, unsigned int order, fpi_t fpi_flags)
{
	unsigned int i;

	if (fpi_flags & FPI_PREPARED)
		return true;

	for (i = 0; i < 1U << order; i++) {
		if (PageZeroed(page + i))
			broken("pfn %lu is freed with a mark", page_to_pfn(page + i));
		page[i].flags.f &= ~PAGE_FLAGS_CHECK_AT_PREP;
	}
	page->private = 0;
	return true;
}

/* Has somebody freed what was queued? */
static void look_at_queue(void)
{
	unsigned int i;

	if (!llist_empty(&the_zone.trylock_free_pages))
		return;

	for (i = 0; i < NR_PAGES; i++) {
		if (kind[i] == QUEUED)
			kind[i] = FREE;
	}
}

static void free_block(unsigned int pfn, unsigned int order, fpi_t fpi)
{
	const unsigned int by = fpi & FPI_INFLATED ? BIT(PAGE_ZEROED_INFLATED) :
						     BIT(PAGE_ZEROED_FREED);
	bool zeroed = fpi & FPI_ZEROED && !(page_zeroed_distrusted & by);

	say(" pfn %u order %u%s%s%s%s", pfn, order,
	    fpi & FPI_ZEROED ? " zeroed" : "", fpi & FPI_INFLATED ? " inflated" : "",
	    fpi & FPI_NOLOCK ? " nolock" : "", fpi & FPI_TO_TAIL ? " tail" : "");

	vouch(pfn, order, zeroed ? by : 0);
	set_pages(pfn, order, fpi & FPI_NOLOCK && trylock_fails ? QUEUED : FREE);
	__free_pages_ok(pfn_to_page(pfn), order, fpi);
	look_at_queue();
}

static fpi_t random_fpi(unsigned int pfn, unsigned int order)
{
	fpi_t fpi = FPI_NONE;

	if (all_zero(pfn, order) && rnd(4))
		fpi |= rnd(2) ? FPI_ZEROED : FPI_ZEROED | FPI_INFLATED;
	if (!rnd(4))
		fpi |= FPI_TO_TAIL;
	return fpi;
}

static void do_free(void)
{
	unsigned int pfn = pick(ALLOCATED, 0);

	say("free");
	if (pfn < NR_PAGES)
		free_block(pfn, order_of[pfn], random_fpi(pfn, order_of[pfn]));
}

/* Somebody has the lock, so it is the next one who frees that has to do it. */
static void do_free_nolock(void)
{
	unsigned int pfn = pick(ALLOCATED, 0);

	say("free, contended,");
	if (pfn == NR_PAGES)
		return;

	trylock_fails = rnd(4);
	free_block(pfn, order_of[pfn], random_fpi(pfn, order_of[pfn]) | FPI_NOLOCK);
	trylock_fails = false;
}

/* Direct compaction takes what it wants on its way to the free lists. */
static void do_free_captured(void)
{
	struct capture_control capc = {
		.zone = &the_zone,
		.migratetype = rnd(MIGRATE_PCPTYPES),
	};
	unsigned int pfn = pick(ALLOCATED, 0);

	say("free, capturing,");
	if (pfn == NR_PAGES)
		return;

	capc.order = order_of[pfn] + rnd(NR_PAGE_ORDERS - order_of[pfn]);
	task.capture_control = &capc;
	free_block(pfn, order_of[pfn], random_fpi(pfn, order_of[pfn]));
	task.capture_control = NULL;

	if (capc.page) {
		check_mark(page_to_pfn(capc.page), capc.order, false);
		leave(capc.page, capc.order);
	}
}

static void do_split_allocation(void)
{
	unsigned int pfn = pick(ALLOCATED, 1), order;

	say("split an allocation at pfn %u", pfn);
	if (pfn == NR_PAGES)
		return;

	order = order_of[pfn] - 1;
	order_of[pfn] = order;
	order_of[pfn + (1U << order)] = order;
}

static void do_write(void)
{
	unsigned int pfn = pick(ALLOCATED, 0);

	say("write at pfn %u", pfn);
	if (pfn == NR_PAGES)
		return;

	if (rnd(3))
		fill(pfn, order_of[pfn], 0);
	else
		dirt[pfn + rnd(1U << order_of[pfn])] = 1;
}

static void do_pcp_fill(void)
{
	unsigned int order = rnd(4);
	struct page *page = take_block(order, rnd(MIGRATE_PCPTYPES));

	say("put order %u on a per-CPU list", order);
	if (!page)
		return;

	set_pages(page_to_pfn(page), order, CACHED);
	memset(reported + page_to_pfn(page), 0, 1U << order);
}

static void do_pcp_drain(void)
{
	unsigned int pfn = pick(CACHED, 0);
	struct page *page = pfn_to_page(pfn);

	say("drain pfn %u from a per-CPU list", pfn);
	if (pfn == NR_PAGES)
		return;

	set_pages(pfn, order_of[pfn], FREE);
	__free_one_page(page, pfn, &the_zone, order_of[pfn],
			get_pfnblock_migratetype(page, pfn), FPI_NONE);
}

static void do_pcp_alloc(void)
{
	unsigned int pfn = pick(CACHED, 0);

	say("allocate from a per-CPU list");
	if (pfn < NR_PAGES)
		leave(pfn_to_page(pfn), order_of[pfn]);
}

static void grab(unsigned int pfn)
{
	__isolate_free_page(pfn_to_page(pfn), order_of[pfn]);
	set_pages(pfn, order_of[pfn], HELD);
	memset(reported + pfn, 0, 1U << order_of[pfn]);
}

static void do_hold(void)
{
	unsigned int pfn = pick(FREE, 0);

	say("isolate pfn %u", pfn);
	if (pfn < NR_PAGES)
		grab(pfn);
}

static void do_put_back(void)
{
	unsigned int pfn = pick(HELD, 0);
	struct page *page = pfn_to_page(pfn);

	say("put back pfn %u", pfn);
	if (pfn == NR_PAGES)
		return;

	set_pages(pfn, order_of[pfn], FREE);
	__putback_isolated_page(page, order_of[pfn], get_pageblock_migratetype(page));
}

/* A thread zeroes a free block, or finds that it cannot. */
static void do_prezero(void)
{
	const unsigned int by_thread = BIT(PAGE_ZEROED_PREZEROED);
	unsigned int pfn = pick(FREE, 0), order;
	struct page *page = pfn_to_page(pfn);

	say("prezero pfn %u", pfn);
	if (pfn == NR_PAGES || !PageBuddy(page))
		return;

	order = order_of[pfn];
	if (!isolate_untouched_block(page, order))
		return;

	set_pages(pfn, order, FREE);
	memset(reported + pfn, 0, 1U << order);
	if (rnd(4)) {
		fill(pfn, order, 0);
		vouch(pfn, order, page_zeroed_distrusted & by_thread ? 0 : by_thread);
		page_zeroed_claim(page, order, PAGE_ZEROED_PREZEROED);
	} else {
		fill(pfn, order, 1);
		vouch(pfn, order, 0);
		page_zeroed_drop(page, order, PAGE_ZEROED_LOST_REMOVED);
	}
	putback_untouched_block(page, order);
}

/* The device zeroes some, spoils some, says which, or fails. */
static void do_report(void)
{
	const unsigned int by_host = BIT(PAGE_ZEROED_REPORTED);
	struct page_reporting_dev_info prdev = { .tells_zeroed = rnd(8) };
	struct scatterlist sgl[4];
	const bool success = rnd(6);
	unsigned int nr = 1 + rnd(4), i;

	say("report%s", success ? "" : ", which fails,");
	for (i = 0; i < nr; i++) {
		unsigned int pfn = pick(FREE, rnd(NR_PAGE_ORDERS)), order;
		bool confirm = rnd(3);

		if (pfn == NR_PAGES)
			break;

		order = order_of[pfn];
		grab(pfn);
		sgl[i] = (struct scatterlist) {
			.page = pfn_to_page(pfn),
			.length = 1U << (order + PAGE_SHIFT),
		};
		say(" %u/%u%s", pfn, order, confirm ? "+" : "");

		if (confirm) {
			prdev.zeroed[0] |= BIT(i);
			if (success && prdev.tells_zeroed)
				fill(pfn, order, 0);
		}
		if (!(confirm && success && prdev.tells_zeroed) && rnd(2))
			dirt[pfn + rnd(1U << order)] = 1;

		if (confirm && success && prdev.tells_zeroed &&
		    !(page_zeroed_distrusted & by_host))
			vouch(pfn, order, by_host);
		else
			vouch(pfn, order, 0);
		memset(reported + pfn, success, 1U << order);
		set_pages(pfn, order, FREE);
	}

	if (!i)
		return;
	sgl[i - 1].last = true;
	page_reporting_drain(&prdev, sgl, i, success);
}

/* Compaction has isolated more free blocks than it had a use for. */
static void do_release(void)
{
	struct list_head lists[NR_PAGE_ORDERS];
	unsigned int i, nr = 1 + rnd(4);

	say("release what compaction has not used:");
	for (i = 0; i < NR_PAGE_ORDERS; i++)
		INIT_LIST_HEAD(&lists[i]);

	while (nr--) {
		unsigned int pfn = pick(FREE, 0);

		if (pfn == NR_PAGES)
			break;

		say(" %u", pfn);
		grab(pfn);
		list_add(&pfn_to_page(pfn)->lru, &lists[order_of[pfn]]);

		/* What is known of all of it remains known. */
		if (!all_vouched(pfn, order_of[pfn]))
			vouch(pfn, order_of[pfn], 0);
		set_pages(pfn, order_of[pfn], FREE);
	}
	release_free_list(lists);
	look_at_queue();
}

void mark_allocated(struct page *page, unsigned int order, gfp_t gfp)
{
	page_zeroed_leave(page, order, false);
	page->_refcount = 1;
}

void __free_pages(struct page *page, unsigned int order)
{
	if (put_page_testzero(page))
		__free_pages_ok(page, order, FPI_NONE);
}

void free_frozen_pages_zeroed(struct page *page, unsigned int order)
{
	__free_pages_ok(page, order, FPI_ZEROED);
}

static void do_isolate(void)
{
	unsigned long pfn = rnd(NR_PAGES) & ~(pageblock_nr_pages - 1);
	struct page *page = pfn_to_page(pfn);
	bool isolate = !get_pageblock_isolate(page);
	unsigned int i;

	say("%s pageblock at pfn %lu", isolate ? "isolate" : "end isolation of", pfn);

	/* It is put back as it was, so its pageblocks must stay alike. */
	for (i = 0; i < nr_blocks; i++) {
		unsigned int head = blocks[i];

		if (kind[head] == HELD && order_of[head] > pageblock_order &&
		    pfn >= head && pfn < head + (1UL << order_of[head]))
			return;
	}
	__move_freepages_block_isolate(&the_zone, page, isolate);
}

/* A folio of which some parts are zeroed, and others need not be. */
static void take_parts(struct list_head *lists, unsigned int first, unsigned int order)
{
	const unsigned int part_order = rnd(order + 1), end = first + (1U << order);
	unsigned long dirty[(2UL << MAX_PAGE_ORDER) / BITS_PER_LONG + 1];
	unsigned int zeroed, pfn, sources = 0;
	bool any = false;

	say("; in parts of order %u", part_order);
	for (pfn = first; pfn < end; pfn++)
		sources |= vouched[pfn];
	zeroed = take_free_frozen_pages(lists, pfn_to_page(first), order, part_order,
					dirty);

	for (pfn = first; pfn < end; pfn += 1U << part_order) {
		bool known = zeroed && !test_bit((pfn - first) >> part_order, dirty);

		if (known && !all_zero(pfn, part_order))
			broken("pfn %u, a part of order %u: left out, and is not zero",
			       pfn, part_order);
		if (known != !!all_vouched(pfn, part_order))
			broken("pfn %u, a part of order %u: %s", pfn, part_order,
			       known ? "nobody has vouched for it" : "what was known is lost");
		any |= known;
	}
	if (any != !!zeroed || (zeroed && zeroed != sources))
		broken("parts of pfn %u, order %u: vouched for by %#x, should be %#x",
		       first, order, zeroed, any ? sources : 0);
	vouch(first, order, 0);
}

static void do_contig(void)
{
	unsigned int order = 1 + rnd(MAX_PAGE_ORDER + 1);
	unsigned int first = rnd(NR_PAGES) & ~((1U << order) - 1), i;
	struct list_head lists[NR_PAGE_ORDERS];
	struct page *page;

	say("allocate a range, pfn %u order %u", first, order);
	if (first + (1U << order) > NR_PAGES)
		return;
	for (i = first; i < first + (1U << order); i += 1U << order_of[i]) {
		page = pfn_to_page(i);
		if (kind[i] != FREE || !PageBuddy(page) || buddy_order(page) > order)
			return;
	}

	for (i = 0; i < NR_PAGE_ORDERS; i++)
		INIT_LIST_HEAD(&lists[i]);
	for (i = first; i < first + (1U << order); i += 1U << order_of[i]) {
		page = pfn_to_page(i);
		grab(i);
		list_add_tail(&page->lru, &lists[order_of[i]]);
	}
	page = pfn_to_page(first);
	if (rnd(2)) {
		take_parts(lists, first, order);
	} else {
		merge_free_frozen_pages(lists, page);
		check_mark(first, order, false);
	}
	leave(page, order);
}

static void do_take_off(void)
{
	unsigned int pfn = pick(FREE, 0);

	if (pfn < NR_PAGES)
		pfn += rnd(2) ? rnd(1U << order_of[pfn]) : 0;
	say("take off pfn %u", pfn);
	if (pfn == NR_PAGES || !take_page_off_buddy(pfn_to_page(pfn)))
		return;

	set_pages(pfn, 0, TAKEN_OFF);
	SetPageHWPoison(pfn_to_page(pfn));
	vouch(pfn, 0, 0);
	fill(pfn, 0, rnd(2));
	reported[pfn] = false;
}

static void do_unpoison(void)
{
	unsigned int pfn = pick(TAKEN_OFF, 0);

	say("put back pfn %u", pfn);
	if (pfn == NR_PAGES)
		return;

	pfn_to_page(pfn)->_refcount = 1;
	set_pages(pfn, 0, FREE);
	put_page_back_buddy(pfn_to_page(pfn));
}

/* Resume from hibernation: what is on the free lists is junk. */
static void do_resume(void)
{
	unsigned int i;

	if (rnd(8))
		return;

	say("resume");
	for (i = 0; i < NR_PAGES; i++) {
		if (kind[i] == FREE) {
			dirt[i] = 1;
			vouched[i] = 0;
		}
	}
	page_zeroed_forget_all();
}

static void do_distrust(void)
{
	unsigned int source = rnd(NR_PAGE_ZEROED_SOURCES);

	if (rnd(8))
		return;

	say("source %u was caught lying", source);
	page_zeroed_distrusted |= BIT(source);
}

static const struct {
	unsigned int weight;
	void (*fn)(void);
} operations[] = {
	{ 24, do_alloc },
	{ 24, do_free },
	{ 4, do_free_nolock },
	{ 6, do_free_captured },
	{ 6, do_split_allocation },
	{ 8, do_write },
	{ 5, do_pcp_fill },
	{ 5, do_pcp_drain },
	{ 3, do_pcp_alloc },
	{ 3, do_hold },
	{ 4, do_put_back },
	{ 5, do_prezero },
	{ 8, do_report },
	{ 4, do_release },
	{ 5, do_isolate },
	{ 4, do_contig },
	{ 3, do_take_off },
	{ 4, do_unpoison },
	{ 1, do_resume },
	{ 1, do_distrust },
};
#define NR_OPERATIONS	(sizeof(operations) / sizeof(operations[0]))

static void one_step(void)
{
	unsigned int i, total = 0, draw;

	for (i = 0; i < NR_OPERATIONS; i++)
		total += operations[i].weight;
	draw = rnd(total);
	for (i = 0; draw >= operations[i].weight; i++)
		draw -= operations[i].weight;

	operations[i].fn();
}

static void start(void)
{
	unsigned int i, mt;

	memset(mem_map, 0, sizeof(mem_map));
	memset(&the_zone, 0, sizeof(the_zone));
	memset(block_isolated, 0, sizeof(block_isolated));
	memset(trace, 0, sizeof(trace));
	memset(vouched, 0, sizeof(vouched));
	memset(reported, 0, sizeof(reported));
	memset(dirt, 1, sizeof(dirt));
	page_zeroed_distrusted = 0;

	for (i = 0; i < NR_PAGE_ORDERS; i++) {
		for (mt = 0; mt < MIGRATE_TYPES; mt++)
			INIT_LIST_HEAD(&the_zone.free_area[i].free_list[mt]);
	}

	step = 0;
	seed_step(STEPS);
	guard_minorder = rnd(4) ? 0 : rnd(3);
	for (i = 0; i < NR_PAGES; i += 1U << MAX_PAGE_ORDER) {
		unsigned int j, type = rnd(MIGRATE_CMA + 1);

		if (type == MIGRATE_HIGHATOMIC)
			type = MIGRATE_MOVABLE;
		for (j = i; j < i + (1U << MAX_PAGE_ORDER); j += pageblock_nr_pages)
			block_type[j >> pageblock_order] = type;
		set_pages(i, MAX_PAGE_ORDER, FREE);
		__free_pages_ok(pfn_to_page(i), MAX_PAGE_ORDER, FPI_NONE);
	}
	memset(trace, 0, sizeof(trace));
	check();
}

static void run(void)
{
	start();
	for (step = 0; step < STEPS; step++) {
		if (skip[step])
			continue;
		seed_step(step);
		one_step();
		check();
	}
}

/* Runs in a child, since a kernel that is broken need not stop where it is. */
static bool fails(bool be_quiet)
{
	int status;
	pid_t pid;

	fflush(stdout);
	pid = fork();
	if (pid < 0) {
		perror("fork");
		exit(3);
	}
	if (!pid) {
		quiet = be_quiet;
		alarm(10);
		run();
		_exit(0);
	}
	if (waitpid(pid, &status, 0) < 0) {
		perror("waitpid");
		exit(3);
	}
	if (!be_quiet && WIFSIGNALED(status))
		printf("BROKEN: killed by signal %d, seed %lu\n", WTERMSIG(status),
		       round_seed);
	return status;
}

/* Leaves out what is not needed for the failure. */
static void shrink(void)
{
	unsigned int len = STEPS / 2, i, j;
	bool saved[STEPS], shrunk;

	do {
		shrunk = false;
		for (i = 0; i < STEPS; i += len) {
			memcpy(saved, skip, sizeof(skip));
			for (j = i; j < i + len && j < STEPS; j++)
				skip[j] = true;
			if (!memcmp(saved, skip, sizeof(skip)))
				continue;
			if (fails(true))
				shrunk = true;
			else
				memcpy(skip, saved, sizeof(skip));
		}
		if (!shrunk)
			len /= 2;
	} while (len);
}

int main(int argc, char **argv)
{
	unsigned long seed = argc > 1 ? strtoul(argv[1], NULL, 0) : 1;
	unsigned long rounds = argc > 2 ? strtoul(argv[2], NULL, 0) : 1;
	unsigned long last = seed + rounds, batch, i;
	int status;
	pid_t pid;

	/* A child for many rounds, until one of them fails. */
	for (; seed < last; seed += batch) {
		batch = last - seed < 256 ? last - seed : 256;

		fflush(stdout);
		pid = fork();
		if (!pid) {
			quiet = true;
			alarm(120);
			for (round_seed = seed; round_seed < seed + batch; round_seed++)
				run();
			_exit(0);
		}
		if (pid < 0 || waitpid(pid, &status, 0) < 0) {
			perror("fork");
			return 3;
		}
		if (!status)
			continue;

		for (i = 0; i < batch; i++) {
			round_seed = seed + i;
			if (!fails(true))
				continue;
			shrink();
			fails(false);
			printf("repeat with: page_zeroed %lu\n", round_seed);
			return 1;
		}
		printf("BROKEN somewhere in seeds %lu to %lu, but not when repeated\n",
		       seed, seed + batch - 1);
		return 1;
	}

	printf("%lu rounds of %u steps, ok\n", rounds, STEPS);
	return 0;
}
