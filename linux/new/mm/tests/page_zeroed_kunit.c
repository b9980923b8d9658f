// SPDX-License-Identifier: GPL-2.0
/*
 * KUnit tests for known-zero pages: the rules of mm/page_zeroed.h on struct
 * pages that no memory belongs to, and what the page allocator makes of them.
 */
#include <kunit/static_stub.h>
#include <kunit/test.h>

#include <linux/balloon.h>
#include <linux/bitmap.h>
#include <linux/gfp.h>
#include <linux/highmem.h>
#include <linux/list.h>
#include <linux/mm.h>
#include <linux/moduleparam.h>
#include <linux/page-isolation.h>
#include <linux/page_zeroed.h>
#include <linux/string.h>
#include <linux/vmstat.h>

#include "../internal.h"
#include "../page_alloc.h"
#include "../page_zeroed.h"

#define REPORTED	BIT(PAGE_ZEROED_REPORTED)
#define FREED		BIT(PAGE_ZEROED_FREED)
#define INFLATED	BIT(PAGE_ZEROED_INFLATED)
#define BOTH		(REPORTED | FREED)

/* What is not known to be zero is filled with this. */
#define DIRT		0x5a

static bool page_zeroed_kunit_report;
module_param_named(report, page_zeroed_kunit_report, bool, 0444);
MODULE_PARM_DESC(report, "Also test the report of a lie, which taints the kernel");

static unsigned long count_of(enum vm_event_item item)
{
	static unsigned long events[NR_VM_EVENT_ITEMS];

	all_vm_events(events);
	return events[item];
}

/* Others count as well, so what we did is a lower bound. */
#define EXPECT_COUNTED(test, item, before, nr)				\
	KUNIT_EXPECT_GE_MSG(test, count_of(item) - (before),		\
			    (unsigned long)(nr), #item)

/* All tests depend on this. Without it they would look at nothing. */
static void skip_if_refused(struct kunit *test)
{
	if (page_zeroed_enable())
		kunit_skip(test, "known-zero pages are not tracked: %s",
			   page_zeroed_obstacle());
}

/*
 * The rules.
 */

#define RULES_ORDER	6U
#define RULES_PAGES	(1U << RULES_ORDER)

static int rules_init(struct kunit *test)
{
	struct page *pages;
	unsigned int i;

	skip_if_refused(test);

	pages = kunit_kcalloc(test, RULES_PAGES, sizeof(*pages), GFP_KERNEL);
	if (!pages)
		return -ENOMEM;

	for (i = 0; i < RULES_PAGES; i++)
		pages[i].page_type = UINT_MAX;

	test->priv = pages;
	return 0;
}

static unsigned int marks(const struct page *page, unsigned int nr)
{
	unsigned int i, n = 0;

	for (i = 0; i < nr; i++)
		n += PageZeroed(page + i);

	return n;
}

/* Nothing is at work on these pages but us; only the counters are shared. */
#define RULES_TRIES	8

#define rules_counted(item, setup, action) ({				\
	unsigned long __least = ULONG_MAX;				\
	unsigned int __try;						\
									\
	for (__try = 0; __try < RULES_TRIES; __try++) {			\
		unsigned long __before;					\
									\
		setup;							\
		__before = count_of(item);				\
		action;							\
		__least = min(__least, count_of(item) - __before);	\
	}								\
	__least;							\
})

struct sources_param {
	const char *desc;
	unsigned int sources;
};

static const struct sources_param sources_params[] = {
	{ "reported", REPORTED },
	{ "freed", FREED },
	{ "reported and freed", BOTH },
	{ "inflated", INFLATED },
	{ "reported and inflated", REPORTED | INFLATED },
};
KUNIT_ARRAY_PARAM_DESC(sources, sources_params, desc);

static void rules_mark_take(struct kunit *test)
{
	const struct sources_param *param = test->param_value;
	struct page *page = test->priv;

	page_zeroed_mark(page, param->sources);
	KUNIT_EXPECT_TRUE(test, PageZeroed(page));
	KUNIT_EXPECT_EQ(test, page_zeroed_sources(page), param->sources);
	KUNIT_EXPECT_EQ(test, marks(page, RULES_PAGES), 1);

	KUNIT_EXPECT_EQ(test, page_zeroed_take(page), param->sources);
	KUNIT_EXPECT_FALSE(test, PageZeroed(page));
	KUNIT_EXPECT_EQ(test, page_zeroed_sources(page), 0);
	KUNIT_EXPECT_EQ(test, page_zeroed_take(page), 0);
}

static void rules_mark_nobody(struct kunit *test)
{
	struct page *page = test->priv;

	page_zeroed_mark(page, 0);
	KUNIT_EXPECT_FALSE(test, PageZeroed(page));
	KUNIT_EXPECT_EQ(test, page_zeroed_sources(page), 0);
}

struct cookie_param {
	const char *desc;
	unsigned long index;
};

static const struct cookie_param cookie_params[] = {
	{ "no index", 0 },
	{ "looks like sources", BOTH },
	{ "cookie of something else", PAGE_ZEROED_COOKIE ^ BIT(31) },
	{ "cookie with a bit too many", PAGE_ZEROED_COOKIE |
				       BIT(NR_PAGE_ZEROED_SOURCES) },
	{ "all ones", ~0UL },
};
KUNIT_ARRAY_PARAM_DESC(cookie, cookie_params, desc);

static void rules_cookie(struct kunit *test)
{
	const struct cookie_param *param = test->param_value;
	struct page *page = test->priv;

	/* With CONFIG_DEBUG_VM this is worth a warning, once. */
	kunit_warning_suppress(test) {
		SetPagePrivate(page);
		page->__folio_index = param->index;
		KUNIT_EXPECT_EQ(test, page_zeroed_sources(page), 0);

		page_zeroed_split(page, page + 1);
		KUNIT_EXPECT_FALSE(test, PageZeroed(page + 1));

		KUNIT_EXPECT_EQ(test, page_zeroed_take(page), 0);
		KUNIT_EXPECT_FALSE(test, PagePrivate(page));
	}
}

struct merge_param {
	const char *desc;
	unsigned int order;
	bool upper;			/* @page is the upper half */
	unsigned int a, b;		/* sources of @page and @buddy */
	unsigned int merged;
};

static const struct merge_param merge_params[] = {
	{ "order 0, zero + zero", 0, false, FREED, FREED, FREED },
	{ "order 0, zero + dirty", 0, false, FREED, 0, 0 },
	{ "order 0, dirty + zero", 0, false, 0, FREED, 0 },
	{ "order 0, dirty + dirty", 0, false, 0, 0, 0 },
	{ "order 0, from above, zero + zero", 0, true, FREED, FREED, FREED },
	{ "order 0, from above, zero + dirty", 0, true, FREED, 0, 0 },
	{ "order 0, from above, dirty + zero", 0, true, 0, FREED, 0 },
	{ "order 0, from above, dirty + dirty", 0, true, 0, 0, 0 },
	{ "order 3, zero + zero", 3, false, REPORTED, REPORTED, REPORTED },
	{ "order 3, zero + dirty", 3, false, REPORTED, 0, 0 },
	{ "order 3, dirty + zero", 3, false, 0, REPORTED, 0 },
	{ "order 3, dirty + dirty", 3, false, 0, 0, 0 },
	{ "order 5, from above, zero + zero", 5, true, FREED, FREED, FREED },
	{ "order 5, from above, zero + dirty", 5, true, FREED, 0, 0 },
	{ "order 5, from above, dirty + zero", 5, true, 0, FREED, 0 },
	{ "two sources", 2, false, REPORTED, FREED, BOTH },
	{ "two sources, from above", 2, true, FREED, REPORTED, BOTH },
	{ "one of two sources again", 2, false, BOTH, FREED, BOTH },
};
KUNIT_ARRAY_PARAM_DESC(merge, merge_params, desc);

static void rules_merge(struct kunit *test)
{
	const struct merge_param *param = test->param_value;
	const bool lost = !param->a != !param->b;
	struct page *head = test->priv;
	struct page *half = head + (1U << param->order);
	struct page *page = param->upper ? half : head;
	struct page *buddy = param->upper ? head : half;
	unsigned long counted;

	counted = rules_counted(PGZEROED_LOST,
		({
			page_zeroed_take(head);
			page_zeroed_mark(page, param->a);
			page_zeroed_mark(buddy, param->b);
		}),
		page_zeroed_merge(page, buddy, head, param->order));

	KUNIT_EXPECT_EQ(test, page_zeroed_sources(head), param->merged);
	KUNIT_EXPECT_EQ(test, marks(head, RULES_PAGES), !!param->merged);
	KUNIT_EXPECT_EQ(test, counted, lost ? 1UL << param->order : 0);
}

static void rules_split(struct kunit *test)
{
	const struct sources_param *param = test->param_value;
	struct page *head = test->priv;
	unsigned int order;

	page_zeroed_mark(head, param->sources);
	for (order = RULES_ORDER; order--; ) {
		page_zeroed_split(head, head + (1U << order));
		KUNIT_EXPECT_EQ(test, page_zeroed_sources(head), param->sources);
		KUNIT_EXPECT_EQ(test, page_zeroed_sources(head + (1U << order)),
				param->sources);
	}
	KUNIT_EXPECT_EQ(test, marks(head, RULES_PAGES), RULES_ORDER + 1);

	/* And back again. */
	for (order = 0; order < RULES_ORDER; order++)
		page_zeroed_merge(head, head + (1U << order), head, order);
	KUNIT_EXPECT_EQ(test, page_zeroed_sources(head), param->sources);
	KUNIT_EXPECT_EQ(test, marks(head, RULES_PAGES), 1);
}

static void rules_split_dirty(struct kunit *test)
{
	struct page *head = test->priv;

	page_zeroed_split(head, head + 1);
	KUNIT_EXPECT_EQ(test, marks(head, RULES_PAGES), 0);
}

static void rules_drop(struct kunit *test)
{
	struct page *page = test->priv;
	unsigned long counted;

	counted = rules_counted(PGZEROED_LOST, page_zeroed_mark(page, FREED),
		page_zeroed_drop(page, 4, PAGE_ZEROED_LOST_REMOVED));
	KUNIT_EXPECT_EQ(test, counted, 16);
	KUNIT_EXPECT_FALSE(test, PageZeroed(page));

	counted = rules_counted(PGZEROED_LOST, ({}),
		page_zeroed_drop(page, 4, PAGE_ZEROED_LOST_REMOVED));
	KUNIT_EXPECT_EQ(test, counted, 0);
}

static void rules_claim(struct kunit *test)
{
	struct page *page = test->priv;
	unsigned long counted;

	counted = rules_counted(PGZEROED_SET_REPORTED, page_zeroed_take(page),
		page_zeroed_claim(page, 3, PAGE_ZEROED_REPORTED));
	KUNIT_EXPECT_EQ(test, counted, 8);
	KUNIT_EXPECT_EQ(test, page_zeroed_sources(page), REPORTED);

	/* Who speaks last is responsible alone, and nothing became zero. */
	counted = rules_counted(PGZEROED_SET_FREED, page_zeroed_mark(page, REPORTED),
		page_zeroed_claim(page, 3, PAGE_ZEROED_FREED));
	KUNIT_EXPECT_EQ(test, counted, 0);
	KUNIT_EXPECT_EQ(test, page_zeroed_sources(page), FREED);
	KUNIT_EXPECT_EQ(test, marks(page, RULES_PAGES), 1);

	counted = rules_counted(PGZEROED_SET_FREED, page_zeroed_take(page),
		page_zeroed_claim(page, 0, PAGE_ZEROED_FREED));
	KUNIT_EXPECT_EQ(test, counted, 1);
}

struct leave_param {
	const char *desc;
	unsigned int sources;
	bool wanted;
	enum vm_event_item item;	/* what is counted */
	unsigned int result;
};

static const struct leave_param leave_params[] = {
	{ "reported, wanted", REPORTED, true, PGZEROED_SKIP_REPORTED, REPORTED },
	{ "freed, wanted", FREED, true, PGZEROED_SKIP_FREED, FREED },
	{ "both, wanted", BOTH, true, PGZEROED_SKIP_REPORTED, BOTH },
	{ "reported, not wanted", REPORTED, false, PGZEROED_UNWANTED, 0 },
	{ "freed, not wanted", FREED, false, PGZEROED_UNWANTED, 0 },
	{ "dirty, wanted", 0, true, PGZEROED_CLEARED, 0 },
};
KUNIT_ARRAY_PARAM_DESC(leave, leave_params, desc);

static void rules_leave(struct kunit *test)
{
	static const enum vm_event_item items[] = {
		PGZEROED_SKIP_REPORTED, PGZEROED_SKIP_FREED, PGZEROED_UNWANTED,
		PGZEROED_LOST, PGZEROED_CLEARED, PGZEROED_BAD,
	};
	const struct leave_param *param = test->param_value;
	struct page *page = test->priv;
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(items); i++) {
		unsigned int result;
		unsigned long counted;

		counted = rules_counted(items[i],
			page_zeroed_mark(page, param->sources),
			result = page_zeroed_leave(page, 2, param->wanted));

		KUNIT_EXPECT_EQ_MSG(test, counted,
				    items[i] == param->item ? 4 : 0,
				    "counter %u of the table", i);
		KUNIT_EXPECT_EQ(test, result, param->result);
		KUNIT_EXPECT_EQ(test, marks(page, RULES_PAGES), 0);
	}
}

static struct kunit_case rules_cases[] = {
	KUNIT_CASE_PARAM(rules_mark_take, sources_gen_params),
	KUNIT_CASE(rules_mark_nobody),
	KUNIT_CASE_PARAM(rules_cookie, cookie_gen_params),
	KUNIT_CASE_PARAM(rules_merge, merge_gen_params),
	KUNIT_CASE_PARAM(rules_split, sources_gen_params),
	KUNIT_CASE(rules_split_dirty),
	KUNIT_CASE(rules_drop),
	KUNIT_CASE(rules_claim),
	KUNIT_CASE_PARAM(rules_leave, leave_gen_params),
	{}
};

static struct kunit_suite rules_suite = {
	.name = "page_zeroed_rules",
	.init = rules_init,
	.test_cases = rules_cases,
};

/*
 * The page allocator. Each test has a lot: the memory of a buddy block of the
 * highest order, which the test owns but for what it has freed. Parts of it that
 * are freed merge with each other only, and as long as the lot is isolated,
 * nobody else can allocate them.
 */

#define LOT_ORDER	MAX_PAGE_ORDER
#define LOT_PAGES	MAX_ORDER_NR_PAGES

struct lot {
	struct page *page;
	struct zone *zone;
	unsigned long distrusted;	/* before the test */
	unsigned long bad;
	DECLARE_BITMAP(owned, LOT_PAGES);

	/* What page_zeroed_report() would have said */
	unsigned int reports;
	unsigned int sources;
	unsigned long bad_page;
	unsigned int bad_offset;
};

/* Starts or ends the isolation of the pageblock that @i is in. */
static void lot_isolate_block(struct lot *lot, unsigned int i, bool isolate)
{
	struct page *page = lot->page + ALIGN_DOWN(i, pageblock_nr_pages);
	struct zone *zone = lot->zone;

	guard(spinlock_irqsave)(&zone->lock);

	if (!!get_pageblock_isolate(page) == isolate)
		return;

	if (isolate && pageblock_isolate_and_move_free_pages(zone, page))
		zone->nr_isolate_pageblock++;
	if (!isolate && pageblock_unisolate_and_move_free_pages(zone, page))
		zone->nr_isolate_pageblock--;
}

static void lot_isolate(struct lot *lot, bool isolate)
{
	unsigned int i;

	for (i = 0; i < LOT_PAGES; i += pageblock_nr_pages)
		lot_isolate_block(lot, i, isolate);
}

static int lot_init(struct kunit *test)
{
	struct lot *lot;

	skip_if_refused(test);

	lot = kunit_kzalloc(test, sizeof(*lot), GFP_KERNEL);
	if (!lot)
		return -ENOMEM;

	lot->distrusted = READ_ONCE(page_zeroed_distrusted);
	if (lot->distrusted)
		kunit_skip(test, "sources %#lx were caught lying before",
			   lot->distrusted);

	lot->bad = count_of(PGZEROED_BAD);
	lot->page = alloc_frozen_pages(GFP_KERNEL | __GFP_NOWARN, LOT_ORDER);
	if (!lot->page)
		return -ENOMEM;

	lot->zone = page_zone(lot->page);
	bitmap_fill(lot->owned, LOT_PAGES);
	test->priv = lot;
	return 0;
}

static void lot_exit(struct kunit *test)
{
	struct lot *lot = test->priv;
	unsigned long i;

	if (!lot)
		return;

	lot_isolate(lot, false);
	for_each_set_bit(i, lot->owned, LOT_PAGES)
		free_frozen_pages(lot->page + i, 0);

	WRITE_ONCE(page_zeroed_distrusted, lot->distrusted);
	KUNIT_EXPECT_EQ_MSG(test, count_of(PGZEROED_BAD), lot->bad,
			    "somebody got a block that is not zero");
}

/* Where @page is in the lot, or LOT_PAGES if it is not. */
static unsigned int lot_index(const struct lot *lot, const struct page *page)
{
	unsigned long first = page_to_pfn(lot->page), pfn = page_to_pfn(page);

	return pfn >= first && pfn < first + LOT_PAGES ? pfn - first : LOT_PAGES;
}

static void lot_fill(struct lot *lot, unsigned int i, unsigned int nr, char c)
{
	for (; nr; nr--)
		memset_page(lot->page + i++, 0, c, PAGE_SIZE);
}

/* How many pages are not zero? The lot owns them all. */
static unsigned int lot_dirty(struct lot *lot, unsigned int i, unsigned int nr)
{
	unsigned int dirty = 0;

	for (; nr; nr--) {
		void *kaddr = kmap_local_page(lot->page + i++);

		dirty += !!memchr_inv(kaddr, 0, PAGE_SIZE);
		kunmap_local(kaddr);
	}
	return dirty;
}

/*
 * Frees a part of the lot as it is. Returns who vouches for it as soon as it is
 * free, before anybody else can have it.
 */
static unsigned int __lot_free(struct lot *lot, unsigned int i,
			       unsigned int order, bool zeroed)
{
	struct page *page = lot->page + i;

	bitmap_clear(lot->owned, i, 1U << order);

	guard(irqsave)();
	if (zeroed)
		free_frozen_pages_zeroed(page, order);
	else
		free_frozen_pages(page, order);

	return page_zeroed_sources(page);
}

/* Frees a part of the lot, zero and known to be so, or dirty. */
static unsigned int lot_free(struct lot *lot, unsigned int i,
			     unsigned int order, bool zero)
{
	lot_fill(lot, i, 1U << order, zero ? 0 : DIRT);
	return __lot_free(lot, i, order, zero);
}

/* Takes a block off the free list, as compaction and page reporting do. */
static bool lot_grab(struct lot *lot, unsigned int i, unsigned int order)
{
	struct page *page = lot->page + i;

	guard(spinlock_irqsave)(&lot->zone->lock);

	return PageBuddy(page) && buddy_order(page) == order &&
	       __isolate_free_page(page, order);
}

static void lot_putback(struct lot *lot, unsigned int i, unsigned int order)
{
	struct page *page = lot->page + i;

	guard(spinlock_irqsave)(&lot->zone->lock);

	__putback_isolated_page(page, order, get_pageblock_migratetype(page));
}

/* Makes an allocation of a block that has been grabbed. */
static void lot_own(struct lot *lot, unsigned int i, unsigned int order,
		    gfp_t gfp)
{
	post_alloc_hook(lot->page + i, order, gfp, ALLOC_DEFAULT, NULL);
	bitmap_set(lot->owned, i, 1U << order);
}

struct lot_view {
	unsigned int free;	/* pages on the free lists */
	unsigned int cached;	/* pages neither ours nor there, but marked */
	unsigned int unmarked;	/* of those free, not known zero */
	unsigned int stray;	/* marks that do not belong where they are */
	unsigned int order;	/* of the first free block */
	unsigned int sources;	/* same */
};

static void lot_look(struct lot *lot, unsigned int i, unsigned int nr,
		     struct lot_view *view)
{
	unsigned int end = i + nr, step;

	memset(view, 0, sizeof(*view));

	guard(spinlock_irqsave)(&lot->zone->lock);

	for (; i < end; i += step) {
		struct page *page = lot->page + i;

		step = 1;
		if (PageBuddy(page)) {
			step <<= buddy_order(page);
			if (!view->free) {
				view->order = buddy_order(page);
				view->sources = page_zeroed_sources(page);
			}
			view->free += step;
			if (!page_zeroed_sources(page))
				view->unmarked += step;
			view->stray += marks(page + 1, step - 1);
		} else if (test_bit(i, lot->owned)) {
			view->stray += marks(page, 1);
		} else {
			view->cached += marks(page, 1);
		}
	}
}

/*
 * Owns what is free of a part of the lot, which is isolated, and expects it to
 * be zero. Returns how much it was.
 */
static unsigned int lot_own_free(struct kunit *test, unsigned int i,
				 unsigned int nr)
{
	struct lot *lot = test->priv;
	unsigned int end = i + nr, got = 0, step;

	for (; i < end; i += step) {
		unsigned int order = 0;

		step = 1;
		if (PageBuddy(lot->page + i))
			order = buddy_order(lot->page + i);
		if (!lot_grab(lot, i, order))
			continue;

		step <<= order;
		lot_own(lot, i, order, GFP_KERNEL | __GFP_ZERO);
		KUNIT_EXPECT_EQ(test, lot_dirty(lot, i, step), 0);
		got += step;
	}
	return got;
}

/*
 * Allocates until it is served from the lot, and gives back what else it got.
 * Returns where the allocation is in the lot.
 */
static unsigned int lot_alloc(struct kunit *test, unsigned int order, gfp_t gfp)
{
	struct lot *lot = test->priv;
	unsigned long tries = totalram_pages() / 2 >> order;
	struct page *page, *next;
	unsigned int i = LOT_PAGES;
	LIST_HEAD(others);

	gfp |= GFP_KERNEL | __GFP_NOWARN | __GFP_NORETRY;
	while (tries--) {
		page = alloc_frozen_pages(gfp, order);
		if (!page)
			break;

		i = lot_index(lot, page);
		if (i < LOT_PAGES)
			break;

		list_add(&page->lru, &others);
	}

	list_for_each_entry_safe(page, next, &others, lru) {
		list_del(&page->lru);
		free_frozen_pages(page, order);
	}

	/* Which memory is handed out first is not for this test to say. */
	if (i >= LOT_PAGES)
		kunit_skip(test, "did not get back anything of order %u", order);
	if (!(gfp & __GFP_COMP))
		bitmap_set(lot->owned, i, 1U << order);
	return i;
}

/* Orders that depend on the configuration */
#define ORDER_BLOCK	-1	/* one below pageblock_order */
#define ORDER_LARGE	-2	/* one below the highest, never more than 9 */

static unsigned int real_order(int order)
{
	switch (order) {
	case ORDER_BLOCK:
		return pageblock_order - 1;
	case ORDER_LARGE:
		return min(9, LOT_ORDER - 1);
	default:
		return order;
	}
}

struct halves_param {
	const char *desc;
	int order;
	bool a, b;		/* are the lower and the upper half zero? */
};

static const struct halves_param halves_params[] = {
	{ "order 0, zero + zero", 0, true, true },
	{ "order 0, zero + dirty", 0, true, false },
	{ "order 0, dirty + zero", 0, false, true },
	{ "order 0, dirty + dirty", 0, false, false },
	{ "order 3, zero + zero", 3, true, true },
	{ "order 3, zero + dirty", 3, true, false },
	{ "order 3, dirty + zero", 3, false, true },
	{ "order 3, dirty + dirty", 3, false, false },
	{ "half a pageblock, zero + zero", ORDER_BLOCK, true, true },
	{ "half a pageblock, zero + dirty", ORDER_BLOCK, true, false },
	{ "half a pageblock, dirty + zero", ORDER_BLOCK, false, true },
	{ "half a pageblock, dirty + dirty", ORDER_BLOCK, false, false },
};
KUNIT_ARRAY_PARAM_DESC(halves, halves_params, desc);

static void alloc_merge(struct kunit *test)
{
	const struct halves_param *param = test->param_value;
	const unsigned int order = real_order(param->order);
	const unsigned int half = 1U << order;
	struct lot *lot = test->priv;
	unsigned int upper_first;

	lot_isolate(lot, true);

	for (upper_first = 0; upper_first < 2; upper_first++) {
		unsigned long lost = count_of(PGZEROED_LOST);
		unsigned long skip, cleared;
		struct lot_view view;

		if (upper_first)
			lot_free(lot, half, order, param->b);
		KUNIT_EXPECT_EQ(test, lot_free(lot, 0, order, param->a),
				upper_first && !param->b ? 0 :
				param->a ? FREED : 0);
		if (!upper_first)
			lot_free(lot, half, order, param->b);

		lot_look(lot, 0, LOT_PAGES, &view);
		KUNIT_ASSERT_EQ(test, view.free, 2 * half);
		KUNIT_EXPECT_EQ(test, view.order, order + 1);
		KUNIT_EXPECT_EQ(test, view.sources,
				param->a && param->b ? FREED : 0);
		KUNIT_EXPECT_EQ(test, view.stray, 0);
		if (param->a != param->b)
			EXPECT_COUNTED(test, PGZEROED_LOST, lost, half);

		skip = count_of(PGZEROED_SKIP_FREED);
		cleared = count_of(PGZEROED_CLEARED);
		KUNIT_EXPECT_EQ(test, lot_own_free(test, 0, 2 * half), 2 * half);
		KUNIT_EXPECT_EQ(test, marks(lot->page, LOT_PAGES), 0);
		if (param->a && param->b)
			EXPECT_COUNTED(test, PGZEROED_SKIP_FREED, skip, 2 * half);
		else
			EXPECT_COUNTED(test, PGZEROED_CLEARED, cleared, 2 * half);
	}
}

struct again_param {
	const char *desc;
	int order;
	bool zero;		/* free it as zeros */
	gfp_t gfp;		/* how to allocate it again */
};

static const struct again_param again_params[] = {
	{ "order 0, zero, for zeros", 0, true, __GFP_ZERO },
	{ "order 0, zero, for anything", 0, true, 0 },
	{ "order 0, dirty, for zeros", 0, false, __GFP_ZERO },
	{ "order 0, dirty, for anything", 0, false, 0 },
	{ "order 3, zero, for zeros", 3, true, __GFP_ZERO },
	{ "order 3, zero, for anything", 3, true, 0 },
	{ "order 3, dirty, for zeros", 3, false, __GFP_ZERO },
	{ "order 3, zero, for a folio of zeros", 3, true, __GFP_ZERO | __GFP_COMP },
	{ "order 3, zero, for any folio", 3, true, __GFP_COMP },
	{ "order 9, zero, for zeros", ORDER_LARGE, true, __GFP_ZERO },
	{ "order 9, zero, for anything", ORDER_LARGE, true, 0 },
	{ "order 9, dirty, for zeros", ORDER_LARGE, false, __GFP_ZERO },
	{ "order 9, zero, for a folio of zeros", ORDER_LARGE, true,
	  __GFP_ZERO | __GFP_COMP },
	{ "order 9, zero, for any folio", ORDER_LARGE, true, __GFP_COMP },
	{ "order 9, dirty, for a folio of zeros", ORDER_LARGE, false,
	  __GFP_ZERO | __GFP_COMP },
};
KUNIT_ARRAY_PARAM_DESC(again, again_params, desc);

static void alloc_again(struct kunit *test)
{
	const struct again_param *param = test->param_value;
	const unsigned int order = real_order(param->order);
	const unsigned int nr = 1U << order;
	const bool wanted = want_init_on_alloc(param->gfp);
	unsigned long set, skip, unwanted, cleared;
	struct lot *lot = test->priv;
	unsigned int i;

	set = count_of(PGZEROED_SET_FREED);
	skip = count_of(PGZEROED_SKIP_FREED);
	unwanted = count_of(PGZEROED_UNWANTED);
	cleared = count_of(PGZEROED_CLEARED);

	KUNIT_EXPECT_EQ(test, lot_free(lot, 0, order, param->zero),
			param->zero ? FREED : 0);
	i = lot_alloc(test, order, param->gfp);
	KUNIT_EXPECT_EQ(test, marks(lot->page, LOT_PAGES), 0);
	if (wanted)
		KUNIT_EXPECT_EQ(test, lot_dirty(lot, i, nr), 0);

	if (param->zero)
		EXPECT_COUNTED(test, PGZEROED_SET_FREED, set, nr);
	if (param->zero && wanted)
		EXPECT_COUNTED(test, PGZEROED_SKIP_FREED, skip, nr);
	else if (param->zero)
		EXPECT_COUNTED(test, PGZEROED_UNWANTED, unwanted, nr);
	else if (wanted)
		EXPECT_COUNTED(test, PGZEROED_CLEARED, cleared, nr);

	/* Nothing must be left of it for the next one. */
	lot_fill(lot, i, nr, DIRT);
	if (param->gfp & __GFP_COMP) {
		free_frozen_pages(lot->page + i, order);
		i = lot_alloc(test, order, __GFP_ZERO);
	} else {
		KUNIT_EXPECT_EQ(test, lot_free(lot, i, order, false), 0);
		i = lot_alloc(test, order, __GFP_ZERO);
	}
	KUNIT_EXPECT_EQ(test, lot_dirty(lot, i, nr), 0);
}

struct balloon_param {
	const char *desc;
	bool marked;	/* as what the host left zero */
	bool found;	/* by somebody who drops the last reference */
};

static const struct balloon_param balloon_params[] = {
	{ "zero", true, false },
	{ "zero, freed by who found it", true, true },
	{ "unknown", false, false },
	{ "unknown, freed by who found it", false, true },
};
KUNIT_ARRAY_PARAM_DESC(balloon, balloon_params, desc);

/* A page that was in a balloon comes back. */
static void alloc_balloon(struct kunit *test)
{
	const struct balloon_param *param = test->param_value;
	const bool known = param->marked && !param->found;
	unsigned long set = count_of(PGZEROED_SET_INFLATED);
	unsigned long skip = count_of(PGZEROED_SKIP_INFLATED);
	struct lot *lot = test->priv;
	struct page *page = lot->page;
	unsigned int sources, i;
	bool left;

	lot_fill(lot, 0, 1, param->marked ? 0 : DIRT);
	set_page_refcounted(page);
	__SetPageOffline(page);
	if (param->marked)
		balloon_page_mark_zeroed(page);
	/* In use, it is not what the page allocator would call known zero. */
	KUNIT_EXPECT_FALSE(test, PageZeroed(page));

	bitmap_clear(lot->owned, 0, 1);
	scoped_guard(irqsave) {
		if (param->found)
			get_page(page);
		balloon_page_put(page);
		if (param->found)
			put_page(page);

		sources = page_zeroed_sources(page);
		left = PageBalloonZeroed(page) || PageOffline(page);
	}
	KUNIT_EXPECT_EQ(test, sources, known ? INFLATED : 0);
	KUNIT_EXPECT_FALSE(test, left);

	i = lot_alloc(test, 0, __GFP_ZERO);
	KUNIT_EXPECT_EQ(test, lot_dirty(lot, i, 1), 0);
	KUNIT_EXPECT_EQ(test, marks(lot->page, LOT_PAGES), 0);
	if (known) {
		EXPECT_COUNTED(test, PGZEROED_SET_INFLATED, set, 1);
		EXPECT_COUNTED(test, PGZEROED_SKIP_INFLATED, skip, 1);
	}
}

static void alloc_bulk(struct kunit *test)
{
	struct lot *lot = test->priv;
	struct page *pages[16] = {};
	unsigned long skip = count_of(PGZEROED_SKIP_FREED);
	unsigned int i, nr, dirty = 0, marked = 0;

	for (i = 0; i < ARRAY_SIZE(pages); i++)
		lot_free(lot, 2 * i, 0, i % 4);

	nr = alloc_pages_bulk(GFP_KERNEL | __GFP_ZERO, ARRAY_SIZE(pages), pages);
	for (i = 0; i < nr; i++) {
		marked += marks(pages[i], 1);
		dirty += !!memchr_inv(page_address(pages[i]), 0, PAGE_SIZE);
		__free_page(pages[i]);
	}
	KUNIT_EXPECT_GT(test, nr, 0);
	KUNIT_EXPECT_EQ(test, marked, 0);
	KUNIT_EXPECT_EQ(test, dirty, 0);
	EXPECT_COUNTED(test, PGZEROED_SKIP_FREED, skip, nr / 2);
}

/* Some of it may have gone to others by the time we look. */
#define FEW_PAGES	64

/* A large block, of which one page is allocated the ordinary way. */
static void alloc_split(struct kunit *test)
{
	const unsigned int order = real_order(ORDER_LARGE);
	const unsigned int nr = 1U << order;
	struct lot *lot = test->priv;
	struct lot_view view;
	unsigned long skip;
	unsigned int i, got;

	KUNIT_EXPECT_EQ(test, lot_free(lot, 0, order, true), FREED);
	skip = count_of(PGZEROED_SKIP_FREED);
	i = lot_alloc(test, 0, __GFP_ZERO);

	/* The rest of it is in many parts, on free lists and per-CPU lists. */
	lot_look(lot, 0, LOT_PAGES, &view);
	KUNIT_EXPECT_GE(test, view.free + view.cached, nr - FEW_PAGES);
	KUNIT_EXPECT_LT(test, view.order, order);
	KUNIT_EXPECT_EQ(test, view.unmarked, 0);
	KUNIT_EXPECT_EQ(test, view.stray, 0);
	KUNIT_EXPECT_EQ(test, lot_dirty(lot, i, 1), 0);

	/* Put together again what can be. */
	lot_isolate(lot, true);
	drain_all_pages(lot->zone);
	lot_look(lot, 0, LOT_PAGES, &view);
	KUNIT_EXPECT_GE(test, view.free, nr - FEW_PAGES);
	KUNIT_EXPECT_EQ(test, view.cached, 0);
	KUNIT_EXPECT_EQ(test, view.unmarked, 0);
	KUNIT_EXPECT_EQ(test, view.stray, 0);

	got = 1 + lot_own_free(test, 0, LOT_PAGES);
	EXPECT_COUNTED(test, PGZEROED_SKIP_FREED, skip, got);
}

struct pcp_param {
	const char *desc;
	int order;
	bool zero;
};

static const struct pcp_param pcp_params[] = {
	{ "order 0, zero", 0, true },
	{ "order 0, dirty", 0, false },
	{ "order 3, zero", 3, true },
	{ "order 3, dirty", 3, false },
};
KUNIT_ARRAY_PARAM_DESC(pcp, pcp_params, desc);

/* Pages on a per-CPU list, when that is drained. */
static void alloc_pcp_drain(struct kunit *test)
{
	const struct pcp_param *param = test->param_value;
	const unsigned int sources = param->zero ? FREED : 0;
	struct lot *lot = test->priv;
	struct lot_view view;

	KUNIT_EXPECT_EQ(test, lot_free(lot, 0, param->order, param->zero),
			sources);
	lot_isolate(lot, true);
	drain_all_pages(lot->zone);

	lot_look(lot, 0, LOT_PAGES, &view);
	KUNIT_ASSERT_EQ(test, view.free, 1U << param->order);
	KUNIT_EXPECT_EQ(test, view.sources, sources);
	KUNIT_EXPECT_EQ(test, view.stray, 0);
	KUNIT_EXPECT_EQ(test, lot_own_free(test, 0, LOT_PAGES),
			1U << param->order);
}

/* A block of the highest order is split, pageblock by pageblock. */
static void alloc_isolate_split(struct kunit *test)
{
	struct lot *lot = test->priv;
	struct lot_view view;

	if (pageblock_order == MAX_PAGE_ORDER)
		kunit_skip(test, "no block has several pageblocks");

	KUNIT_EXPECT_EQ(test, lot_free(lot, 0, LOT_ORDER, true), FREED);
	lot_isolate(lot, true);

	lot_look(lot, 0, LOT_PAGES, &view);
	KUNIT_EXPECT_GE(test, view.free, (unsigned int)LOT_PAGES - FEW_PAGES);
	KUNIT_EXPECT_LE(test, view.order, pageblock_order);
	KUNIT_EXPECT_EQ(test, view.unmarked, 0);
	KUNIT_EXPECT_EQ(test, view.stray, 0);
	KUNIT_EXPECT_EQ(test, lot_own_free(test, 0, LOT_PAGES), view.free);
}

/* Reported, put back, and merged with something that was freed as zeros. */
static void alloc_sources(struct kunit *test)
{
	struct lot *lot = test->priv;
	struct lot_view view;
	unsigned long skip;
	unsigned int i;

	lot_isolate(lot, true);

	lot_free(lot, 0, 3, false);
	KUNIT_ASSERT_TRUE(test, lot_grab(lot, 0, 3));
	debug_pagealloc_map_pages(lot->page, 8);
	for (i = 0; i < 8; i++)
		page_zeroed_clear_free(lot->page + i);
	debug_pagealloc_unmap_pages(lot->page, 8);
	page_zeroed_claim(lot->page, 3, PAGE_ZEROED_REPORTED);
	lot_putback(lot, 0, 3);

	lot_look(lot, 0, LOT_PAGES, &view);
	KUNIT_EXPECT_EQ(test, view.sources, REPORTED);

	/* Isolation alone changes nothing. */
	KUNIT_ASSERT_TRUE(test, lot_grab(lot, 0, 3));
	lot_putback(lot, 0, 3);

	lot_free(lot, 8, 3, true);
	lot_look(lot, 0, LOT_PAGES, &view);
	KUNIT_EXPECT_EQ(test, view.order, 4);
	KUNIT_EXPECT_EQ(test, view.sources, BOTH);
	KUNIT_EXPECT_EQ(test, view.stray, 0);

	skip = count_of(PGZEROED_SKIP_REPORTED);
	KUNIT_EXPECT_EQ(test, lot_own_free(test, 0, 16), 16);
	EXPECT_COUNTED(test, PGZEROED_SKIP_REPORTED, skip, 16);
}

/* The caller does not want zeros yet, but wants to know. */
static void alloc_keep(struct kunit *test)
{
	const gfp_t gfps[] = { GFP_KERNEL, GFP_KERNEL | __GFP_ZERO };
	struct lot *lot = test->priv;
	unsigned int i;

	lot_isolate(lot, true);

	for (i = 0; i < 4; i++) {
		const gfp_t gfp = gfps[i / 2];
		const bool zero = i % 2;
		unsigned int zeroed = 0;
		const struct page_content content = { .zeroed = &zeroed };
		unsigned long skip = count_of(PGZEROED_SKIP_FREED);

		lot_free(lot, 0, 0, zero);
		KUNIT_ASSERT_TRUE(test, lot_grab(lot, 0, 0));
		post_alloc_hook(lot->page, 0, gfp, ALLOC_DEFAULT, &content);
		bitmap_set(lot->owned, 0, 1);

		KUNIT_EXPECT_EQ(test, zeroed, zero ? FREED : 0);
		KUNIT_EXPECT_EQ(test, marks(lot->page, 1), 0);
		if (zero || want_init_on_alloc(gfp))
			KUNIT_EXPECT_EQ(test, lot_dirty(lot, 0, 1), 0);

		/* It counts when it is put to use. */
		KUNIT_EXPECT_EQ(test, page_zeroed_settle(lot->page, 0, zeroed, true),
				zeroed);
		EXPECT_COUNTED(test, PGZEROED_SKIP_FREED, skip, zero);
	}
}

#ifdef CONFIG_CONTIG_ALLOC
struct contig_param {
	const char *desc;
	gfp_t gfp;
	bool a, b;
	bool user;	/* for a user address */
};

static const struct contig_param contig_params[] = {
	{ "pages, zero + zero", __GFP_ZERO, true, true },
	{ "pages, zero + dirty", __GFP_ZERO, true, false },
	{ "pages, dirty + zero", __GFP_ZERO, false, true },
	{ "pages, dirty + dirty", __GFP_ZERO, false, false },
	{ "any pages, zero + dirty", 0, true, false },
	{ "folio, zero + zero", __GFP_ZERO | __GFP_COMP, true, true },
	{ "folio, zero + dirty", __GFP_ZERO | __GFP_COMP, true, false },
	{ "folio, dirty + zero", __GFP_ZERO | __GFP_COMP, false, true },
	{ "folio, dirty + dirty", __GFP_ZERO | __GFP_COMP, false, false },
	{ "any folio, zero + zero", __GFP_COMP, true, true },
	{ "any folio, dirty + zero", __GFP_COMP, false, true },
	{ "user folio, zero + zero", __GFP_ZERO | __GFP_COMP, true, true, true },
	{ "user folio, zero + dirty", __GFP_ZERO | __GFP_COMP, true, false, true },
	{ "user folio, dirty + zero", __GFP_ZERO | __GFP_COMP, false, true, true },
	{ "user folio, dirty + dirty", __GFP_ZERO | __GFP_COMP, false, false, true },
};
KUNIT_ARRAY_PARAM_DESC(contig, contig_params, desc);

/* An allocation that is made of two free blocks. */
static void alloc_contig(struct kunit *test)
{
	const struct page_content content = { .user_addr = 0x12345678 };
	const struct contig_param *param = test->param_value;
	const bool wanted = want_init_on_alloc(param->gfp);
	struct lot *lot = test->priv;
	unsigned long pfn = page_to_pfn(lot->page);
	unsigned int nr = pageblock_nr_pages, zero, order;
	unsigned long skip, cleared;
	struct lot_view a, b;
	int err;

	if (pageblock_order == MAX_PAGE_ORDER)
		kunit_skip(test, "two free pageblocks cannot be told from one");

	/* Isolate one, so that they do not merge when they are freed. */
	order = pageblock_order;
	lot_isolate_block(lot, 0, true);
	lot_free(lot, 0, order, param->a);
	lot_free(lot, nr, order, param->b);
	/* With THP, a pageblock may be kept on a per-CPU list. */
	drain_all_pages(page_zone(lot->page));
	lot_isolate_block(lot, 0, false);

	lot_look(lot, 0, nr, &a);
	lot_look(lot, nr, nr, &b);
	KUNIT_ASSERT_EQ(test, a.order, order);
	KUNIT_ASSERT_EQ(test, b.order, order);
	KUNIT_EXPECT_EQ(test, a.sources, param->a ? FREED : 0);
	KUNIT_EXPECT_EQ(test, b.sources, param->b ? FREED : 0);

	skip = count_of(PGZEROED_SKIP_FREED);
	cleared = count_of(PGZEROED_CLEARED);
	err = __alloc_contig_frozen_range(pfn, pfn + 2 * nr, ACR_FLAGS_NONE,
					  GFP_KERNEL | param->gfp,
					  param->user ? &content : NULL);
	KUNIT_ASSERT_EQ(test, err, 0);

	KUNIT_EXPECT_EQ(test, marks(lot->page, 2 * nr), 0);
	if (wanted)
		KUNIT_EXPECT_EQ(test, lot_dirty(lot, 0, 2 * nr), 0);

	/* A folio is initialised in one go with init_on_alloc=1. */
	if ((param->gfp & __GFP_COMP) && want_init_on_alloc(0))
		zero = param->a && param->b ? 2 * nr : 0;
	else
		zero = (param->a + param->b) * nr;
	if (wanted) {
		EXPECT_COUNTED(test, PGZEROED_SKIP_FREED, skip, zero);
		EXPECT_COUNTED(test, PGZEROED_CLEARED, cleared, 2 * nr - zero);
	}

	if (param->gfp & __GFP_COMP)
		free_frozen_pages(lot->page, order + 1);
	else
		bitmap_set(lot->owned, 0, 2 * nr);
}
#endif

#ifdef CONFIG_MEMORY_FAILURE
/* A page goes bad in the middle of a block. */
static void alloc_take_off(struct kunit *test)
{
	const unsigned int order = 5, bad = 19;
	struct lot *lot = test->priv;
	struct page *page = lot->page + bad;
	struct lot_view view;
	unsigned long lost;

	lot_isolate(lot, true);
	lot_free(lot, 0, order, true);

	KUNIT_ASSERT_TRUE(test, take_page_off_buddy(page));
	KUNIT_EXPECT_FALSE(test, PageZeroed(page));
	lot_look(lot, 0, LOT_PAGES, &view);
	KUNIT_EXPECT_EQ(test, view.free, 31);
	KUNIT_EXPECT_EQ(test, view.cached, 0);
	KUNIT_EXPECT_EQ(test, view.unmarked, 0);
	KUNIT_EXPECT_EQ(test, view.stray, 0);

	/* Whatever was written to it meanwhile, it comes back as that. */
	lost = count_of(PGZEROED_LOST);
	set_page_refcounted(page);
	put_page_back_buddy(page);
	lot_look(lot, 0, LOT_PAGES, &view);
	KUNIT_EXPECT_EQ(test, view.free, 32);
	KUNIT_EXPECT_EQ(test, view.order, order);
	KUNIT_EXPECT_EQ(test, view.sources, 0);
	KUNIT_EXPECT_EQ(test, view.stray, 0);
	EXPECT_COUNTED(test, PGZEROED_LOST, lost, 31);

	KUNIT_EXPECT_EQ(test, lot_own_free(test, 0, LOT_PAGES), 32);
}

/* The page that goes bad is the one that carries the mark. */
static void alloc_take_off_head(struct kunit *test)
{
	struct lot *lot = test->priv;
	struct lot_view view;

	lot_isolate(lot, true);
	lot_free(lot, 0, 5, true);

	KUNIT_ASSERT_TRUE(test, take_page_off_buddy(lot->page));
	KUNIT_EXPECT_FALSE(test, PageZeroed(lot->page));
	lot_look(lot, 0, LOT_PAGES, &view);
	KUNIT_EXPECT_EQ(test, view.free, 31);
	KUNIT_EXPECT_EQ(test, view.unmarked, 0);

	set_page_refcounted(lot->page);
	put_page_back_buddy(lot->page);
	KUNIT_EXPECT_EQ(test, lot_own_free(test, 0, LOT_PAGES), 32);
}
#endif

/* A source that was caught lying is believed neither before nor afterwards. */
static void alloc_distrust(struct kunit *test)
{
	struct lot *lot = test->priv;
	unsigned long lost, cleared;

	lot_isolate(lot, true);

	lot_fill(lot, 0, 8, DIRT);
	KUNIT_EXPECT_EQ(test, __lot_free(lot, 0, 3, true), FREED);
	WRITE_ONCE(page_zeroed_distrusted, FREED);

	lost = count_of(PGZEROED_LOST);
	cleared = count_of(PGZEROED_CLEARED);
	KUNIT_EXPECT_EQ(test, lot_own_free(test, 0, 8), 8);
	KUNIT_EXPECT_EQ(test, marks(lot->page, LOT_PAGES), 0);
	EXPECT_COUNTED(test, PGZEROED_LOST, lost, 8);
	EXPECT_COUNTED(test, PGZEROED_CLEARED, cleared, 8);

	KUNIT_EXPECT_EQ(test, lot_free(lot, 0, 3, true), 0);
	KUNIT_EXPECT_EQ(test, lot_own_free(test, 0, 8), 8);

	/* That is about one source. Where it vouched with another, about both. */
	page_zeroed_mark(lot->page, REPORTED);
	KUNIT_EXPECT_EQ(test, page_zeroed_leave(lot->page, 0, true), REPORTED);
	page_zeroed_mark(lot->page, BOTH);
	KUNIT_EXPECT_EQ(test, page_zeroed_leave(lot->page, 0, true), 0);
}

static void fake_report(struct page *page, unsigned int order,
			unsigned int sources, struct page *bad,
			unsigned int offset)
{
	struct kunit *test = kunit_get_current_test();
	struct lot *lot = test->priv;

	lot->reports++;
	lot->sources = sources;
	lot->bad_page = bad - page;
	lot->bad_offset = offset;
}

static void verify_restore(void *interval)
{
	WRITE_ONCE(page_zeroed_verify_interval, (uintptr_t)interval);
	if (!page_zeroed_verify_interval)
		static_branch_disable(&page_zeroed_verify_enabled);
}

/* Checks everything until the end of the test. */
static void verify_all(struct kunit *test)
{
	uintptr_t interval = READ_ONCE(page_zeroed_verify_interval);
	int err;

	err = kunit_add_action_or_reset(test, verify_restore, (void *)interval);
	KUNIT_ASSERT_EQ(test, err, 0);

	WRITE_ONCE(page_zeroed_verify_interval, 1);
	static_branch_enable(&page_zeroed_verify_enabled);
}

static void plant(struct lot *lot, unsigned int i, unsigned int offset)
{
	memset_page(lot->page + i, offset, 1, 1);
}

struct verify_param {
	const char *desc;
	unsigned int page, offset;
};

static const struct verify_param verify_params[] = {
	{ "first byte", 0, 0 },
	{ "last byte of the first page", 0, PAGE_SIZE - 1 },
	{ "somewhere", 5, 1234 },
	{ "last byte", 7, PAGE_SIZE - 1 },
};
KUNIT_ARRAY_PARAM_DESC(verify, verify_params, desc);

/* The check itself. Its report, which taints, is replaced. */
static void verify_detects(struct kunit *test)
{
	const struct verify_param *param = test->param_value;
	struct lot *lot = test->priv;

	verify_all(test);
	kunit_activate_static_stub(test, page_zeroed_report, fake_report);

	lot_fill(lot, 0, 8, 0);
	lot_fill(lot, 8, 1, DIRT);
	__page_zeroed_verify(lot->page, 3, REPORTED);
	KUNIT_EXPECT_EQ(test, lot->reports, 0);
	KUNIT_EXPECT_EQ(test, page_zeroed_distrusted, 0);

	plant(lot, param->page, param->offset);
	__page_zeroed_verify(lot->page, 3, REPORTED);
	KUNIT_EXPECT_EQ(test, lot->reports, 1);
	KUNIT_EXPECT_EQ(test, lot->sources, REPORTED);
	KUNIT_EXPECT_EQ(test, lot->bad_page, param->page);
	KUNIT_EXPECT_EQ(test, lot->bad_offset, param->offset);
	/* Who passes on what others say falls with them. */
	KUNIT_EXPECT_EQ(test, page_zeroed_distrusted, REPORTED | FREED);
	KUNIT_EXPECT_EQ(test, lot_dirty(lot, 0, 8), 0);
	KUNIT_EXPECT_EQ(test, lot_dirty(lot, 8, 1), 1);
}

/* From the lie to the allocation that it would have spoilt. */
static void verify_allocation(struct kunit *test)
{
	struct lot *lot = test->priv;

	verify_all(test);
	kunit_activate_static_stub(test, page_zeroed_report, fake_report);
	lot_isolate(lot, true);

	lot_fill(lot, 0, 16, 0);
	plant(lot, 3, 77);
	__lot_free(lot, 0, 3, true);
	__lot_free(lot, 16, 3, true);

	KUNIT_EXPECT_EQ(test, lot_own_free(test, 0, 8), 8);
	KUNIT_EXPECT_EQ(test, lot->reports, 1);
	KUNIT_EXPECT_EQ(test, lot->sources, FREED);
	KUNIT_EXPECT_EQ(test, lot->bad_page, 3);
	/* It may have been anybody whose word was passed on. */
	KUNIT_EXPECT_EQ(test, page_zeroed_distrusted, PAGE_ZEROED_SOURCES);

	/* The other block is not believed any more, nor looked at. */
	KUNIT_EXPECT_EQ(test, lot_own_free(test, 16, 8), 8);
	KUNIT_EXPECT_EQ(test, lot->reports, 1);
}

/* One lie, reported for real. */
static void verify_report(struct kunit *test)
{
	struct lot *lot = test->priv;

	if (!page_zeroed_kunit_report)
		kunit_skip(test, "taints; page_zeroed_kunit.report=1 asks for it");

	verify_all(test);
	lot_isolate(lot, true);

	lot_fill(lot, 0, 8, 0);
	plant(lot, 3, 77);
	__lot_free(lot, 0, 3, true);
	KUNIT_EXPECT_EQ(test, lot_own_free(test, 0, 8), 8);
	KUNIT_EXPECT_EQ(test, count_of(PGZEROED_BAD) - lot->bad, 8);
	KUNIT_EXPECT_TRUE(test, test_taint(TAINT_BAD_PAGE));
	lot->bad += 8;
}

static struct kunit_case alloc_cases[] = {
	KUNIT_CASE_PARAM(alloc_merge, halves_gen_params),
	KUNIT_CASE_PARAM(alloc_again, again_gen_params),
	KUNIT_CASE_PARAM(alloc_balloon, balloon_gen_params),
	KUNIT_CASE(alloc_bulk),
	KUNIT_CASE(alloc_split),
	KUNIT_CASE_PARAM(alloc_pcp_drain, pcp_gen_params),
	KUNIT_CASE(alloc_isolate_split),
	KUNIT_CASE(alloc_sources),
	KUNIT_CASE(alloc_keep),
#ifdef CONFIG_CONTIG_ALLOC
	KUNIT_CASE_PARAM(alloc_contig, contig_gen_params),
#endif
#ifdef CONFIG_MEMORY_FAILURE
	KUNIT_CASE(alloc_take_off),
	KUNIT_CASE(alloc_take_off_head),
#endif
	KUNIT_CASE(alloc_distrust),
	KUNIT_CASE_PARAM(verify_detects, verify_gen_params),
	KUNIT_CASE(verify_allocation),
	KUNIT_CASE(verify_report),
	{}
};

static struct kunit_suite alloc_suite = {
	.name = "page_zeroed_alloc",
	.init = lot_init,
	.exit = lot_exit,
	.test_cases = alloc_cases,
};

kunit_test_suites(&rules_suite, &alloc_suite);
