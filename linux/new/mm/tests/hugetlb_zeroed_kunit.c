// SPDX-License-Identifier: GPL-2.0
/*
 * KUnit tests for known-zero hugetlb folios: HPG_zeroed on a folio that no
 * memory belongs to, and what becomes of a folio of the pool that has it.
 */
#include <kunit/static_stub.h>
#include <kunit/test.h>

#include <linux/gfp.h>
#include <linux/highmem.h>
#include <linux/hugetlb.h>
#include <linux/mempolicy.h>
#include <linux/mm.h>
#include <linux/page_zeroed.h>
#include <linux/string.h>
#include <linux/vmstat.h>

#include "../hugetlb_internal.h"
#include "../hugetlb_zeroed.h"
#include "../page_zeroed.h"

#define REPORTED	BIT(PAGE_ZEROED_REPORTED)
#define FREED		BIT(PAGE_ZEROED_FREED)
#define BOTH		(REPORTED | FREED)

/* What is not known to be zero is filled with this. */
#define DIRT		0x5a

static unsigned long count_of(enum vm_event_item item)
{
	static unsigned long events[NR_VM_EVENT_ITEMS];

	all_vm_events(events);
	return events[item];
}

/*
 * The flag.
 */

static int flag_init(struct kunit *test)
{
	test->priv = kunit_kzalloc(test, sizeof(struct folio), GFP_KERNEL);
	return test->priv ? 0 : -ENOMEM;
}

struct flag_param {
	const char *desc;
	unsigned int sources;
};

static const struct flag_param flag_params[] = {
	{ "reported", REPORTED },
	{ "freed", FREED },
	{ "both", BOTH },
	{ "all", PAGE_ZEROED_SOURCES },
};
KUNIT_ARRAY_PARAM_DESC(flag, flag_params, desc);

static void flag_mark_take(struct kunit *test)
{
	const struct flag_param *param = test->param_value;
	struct folio *folio = test->priv;

	hugetlb_zeroed_mark(folio, param->sources);
	KUNIT_EXPECT_TRUE(test, folio_test_hugetlb_zeroed(folio));
	KUNIT_EXPECT_EQ(test, hugetlb_zeroed_sources(folio), param->sources);
	KUNIT_EXPECT_EQ(test, hugetlb_zeroed_take(folio), param->sources);
	KUNIT_EXPECT_FALSE(test, folio_test_hugetlb_zeroed(folio));
	KUNIT_EXPECT_EQ(test, hugetlb_zeroed_take(folio), 0);
	KUNIT_EXPECT_NULL(test, folio->private);
}

/* The last one to say so replaces the others, and nobody says nothing. */
static void flag_mark_again(struct kunit *test)
{
	struct folio *folio = test->priv;

	hugetlb_zeroed_mark(folio, 0);
	KUNIT_EXPECT_NULL(test, folio->private);

	hugetlb_zeroed_mark(folio, REPORTED);
	hugetlb_zeroed_mark(folio, FREED);
	KUNIT_EXPECT_EQ(test, hugetlb_zeroed_sources(folio), FREED);

	hugetlb_zeroed_mark(folio, 0);
	KUNIT_EXPECT_EQ(test, hugetlb_zeroed_sources(folio), FREED);
}

/* Without the flag, the mask beside it means nothing. */
static void flag_clear(struct kunit *test)
{
	struct folio *folio = test->priv;

	hugetlb_zeroed_mark(folio, BOTH);
	folio_clear_hugetlb_zeroed(folio);
	KUNIT_EXPECT_EQ(test, hugetlb_zeroed_sources(folio), 0);
	KUNIT_EXPECT_EQ(test, hugetlb_zeroed_take(folio), 0);

	hugetlb_zeroed_mark(folio, FREED);
	KUNIT_EXPECT_EQ(test, hugetlb_zeroed_take(folio), FREED);
}

/* The other flags are none of our business. */
static void flag_neighbours(struct kunit *test)
{
	struct folio *folio = test->priv;
	unsigned long others = (BIT(__NR_HPAGEFLAGS) - 1) & ~BIT(HPG_zeroed);

	folio->private = (void *)others;
	KUNIT_EXPECT_EQ(test, hugetlb_zeroed_sources(folio), 0);

	hugetlb_zeroed_mark(folio, BOTH);
	KUNIT_EXPECT_EQ(test, (unsigned long)folio->private & others, others);
	KUNIT_EXPECT_TRUE(test, folio_test_hugetlb_cma(folio));

	hugetlb_zeroed_take(folio);
	KUNIT_EXPECT_EQ(test, (unsigned long)folio->private, others);
}

static struct kunit_case flag_cases[] = {
	KUNIT_CASE_PARAM(flag_mark_take, flag_gen_params),
	KUNIT_CASE(flag_mark_again),
	KUNIT_CASE(flag_clear),
	KUNIT_CASE(flag_neighbours),
	{}
};

static struct kunit_suite flag_suite = {
	.name = "page_zeroed_hugetlb_flag",
	.init = flag_init,
	.test_cases = flag_cases,
};

/*
 * The pool. Each test has the only folio in it.
 */

struct pool {
	struct hstate *h;
	struct folio *folio;
	unsigned long distrusted;	/* before the test */
	unsigned long bad;

	/* What page_zeroed_report() would have said */
	unsigned int reports;
	unsigned int sources;
};

static void pool_resize(struct pool *pool, unsigned long nr)
{
	__nr_hugepages_store_common(false, pool->h, NUMA_NO_NODE, nr, 0);
}

/* The free folio in the pool. NULL if it is not there. */
static struct folio *pool_look(struct pool *pool)
{
	int nid;

	guard(spinlock_irq)(&hugetlb_lock);

	for_each_online_node(nid) {
		struct list_head *list = &pool->h->hugepage_freelists[nid];

		if (!list_empty(list))
			return list_first_entry(list, struct folio, lru);
	}

	return NULL;
}

static int pool_init(struct kunit *test)
{
	struct pool *pool;

	if (page_zeroed_enable())
		kunit_skip(test, "known-zero pages are not tracked: %s",
			   page_zeroed_obstacle());
	if (!hugepages_supported() || hstate_is_gigantic(&default_hstate))
		kunit_skip(test, "no huge pages of a size that fits in here");
	if (default_hstate.nr_huge_pages)
		kunit_skip(test, "somebody uses the pool");

	pool = kunit_kzalloc(test, sizeof(*pool), GFP_KERNEL);
	if (!pool)
		return -ENOMEM;

	pool->h = &default_hstate;
	pool->distrusted = READ_ONCE(page_zeroed_distrusted);
	if (pool->distrusted)
		kunit_skip(test, "sources %#lx were caught lying before",
			   pool->distrusted);

	pool->bad = count_of(PGZEROED_BAD);
	pool_resize(pool, 1);
	pool->folio = pool_look(pool);
	if (!pool->folio)
		return -ENOMEM;

	test->priv = pool;
	return 0;
}

static void pool_exit(struct kunit *test)
{
	struct pool *pool = test->priv;

	if (!pool)
		return;

	WRITE_ONCE(page_zeroed_distrusted, pool->distrusted);
	pool_resize(pool, 0);
	KUNIT_EXPECT_EQ_MSG(test, pool->h->nr_huge_pages, 0,
			    "a test has not given its folio back");
	KUNIT_EXPECT_EQ(test, count_of(PGZEROED_BAD), pool->bad);
}

/* Fills the free folio, and says of it what may be true or not. */
static void pool_set(struct pool *pool, char c, unsigned int sources)
{
	long i;

	for (i = 0; i < folio_nr_pages(pool->folio); i++)
		memset_page(folio_page(pool->folio, i), 0, c, PAGE_SIZE);

	guard(spinlock_irq)(&hugetlb_lock);

	hugetlb_zeroed_take(pool->folio);
	hugetlb_zeroed_mark(pool->folio, sources);
}

/* How many pages of the folio are not all @c? */
static long pool_differs(struct pool *pool, char c)
{
	long i, nr = 0;

	for (i = 0; i < folio_nr_pages(pool->folio); i++) {
		void *kaddr = kmap_local_folio(pool->folio, i * PAGE_SIZE);

		nr += !!memchr_inv(kaddr, c, PAGE_SIZE);
		kunmap_local(kaddr);
	}

	return nr;
}

static struct folio *pool_alloc(struct kunit *test, gfp_t gfp)
{
	struct pool *pool = test->priv;
	struct mempolicy_interpreted mpoli = {
		.nid = folio_nid(pool->folio),
		.mode = MPOL_DEFAULT,
	};
	struct folio *folio;

	folio = hugetlb_alloc_folio(pool->h, &mpoli, NULL, gfp, 0x1234567, 0);
	KUNIT_ASSERT_PTR_EQ(test, folio, pool->folio);
	KUNIT_EXPECT_FALSE(test, folio_test_hugetlb_zeroed(folio));
	return folio;
}

struct alloc_param {
	const char *desc;
	gfp_t gfp;
	char content;
	unsigned int sources;
	enum vm_event_item item;	/* what is counted */
};

static const struct alloc_param alloc_params[] = {
	{ "known zero, wanted", __GFP_ZERO, 0, REPORTED, PGZEROED_SKIP_REPORTED },
	{ "known zero by two, wanted", __GFP_ZERO, 0, BOTH, PGZEROED_SKIP_REPORTED },
	{ "known zero, not wanted", 0, 0, FREED, PGZEROED_UNWANTED },
	{ "dirty, wanted", __GFP_ZERO, DIRT, 0, PGZEROED_CLEARED },
	{ "zero, wanted", __GFP_ZERO, 0, 0, PGZEROED_CLEARED },
	{ "dirty, not wanted", 0, DIRT, 0, NR_VM_EVENT_ITEMS },
};
KUNIT_ARRAY_PARAM_DESC(alloc, alloc_params, desc);

static void pool_hand_out(struct kunit *test)
{
	static const enum vm_event_item items[] = {
		PGZEROED_SKIP_REPORTED, PGZEROED_SKIP_FREED, PGZEROED_UNWANTED,
		PGZEROED_CLEARED,
	};
	const struct alloc_param *param = test->param_value;
	struct pool *pool = test->priv;
	unsigned long before[ARRAY_SIZE(items)];
	struct folio *folio;
	unsigned int i;

	pool_set(pool, param->content, param->sources);
	for (i = 0; i < ARRAY_SIZE(items); i++)
		before[i] = count_of(items[i]);

	folio = pool_alloc(test, param->gfp);

	for (i = 0; i < ARRAY_SIZE(items); i++) {
		unsigned long counted = count_of(items[i]) - before[i];

		/* Others count as well, though hardly as much. */
		if (items[i] == param->item)
			KUNIT_EXPECT_GE(test, counted, pages_per_huge_page(pool->h));
		else
			KUNIT_EXPECT_LT(test, counted, pages_per_huge_page(pool->h));
	}
	KUNIT_EXPECT_EQ(test, pool_differs(pool, param->gfp ? 0 : param->content), 0);
	folio_put(folio);
}

/* Somebody has used it: it is not zero, although it once was. */
static void pool_used(struct kunit *test)
{
	struct pool *pool = test->priv;
	struct folio *folio;
	unsigned long cleared;

	pool_set(pool, 0, BOTH);
	folio = pool_alloc(test, __GFP_ZERO);
	memset_page(folio_page(folio, 1), 0, DIRT, PAGE_SIZE);
	folio_put(folio);

	KUNIT_ASSERT_PTR_EQ(test, pool_look(pool), folio);
	KUNIT_EXPECT_FALSE(test, folio_test_hugetlb_zeroed(folio));

	cleared = count_of(PGZEROED_CLEARED);
	folio = pool_alloc(test, __GFP_ZERO);
	KUNIT_EXPECT_EQ(test, pool_differs(pool, 0), 0);
	KUNIT_EXPECT_GE(test, count_of(PGZEROED_CLEARED) - cleared,
			pages_per_huge_page(pool->h));
	folio_put(folio);
}

/* What is migrated to is overwritten, and does not stay known to be zero. */
static void pool_migrate(struct kunit *test)
{
	struct pool *pool = test->priv;
	struct folio *folio;
	unsigned long unwanted;

	pool_set(pool, 0, REPORTED);
	unwanted = count_of(PGZEROED_UNWANTED);
	folio = alloc_hugetlb_folio_nodemask(pool->h, folio_nid(pool->folio), NULL,
					     htlb_alloc_mask(pool->h), false);
	KUNIT_ASSERT_PTR_EQ(test, folio, pool->folio);
	KUNIT_EXPECT_FALSE(test, folio_test_hugetlb_zeroed(folio));
	KUNIT_EXPECT_GE(test, count_of(PGZEROED_UNWANTED) - unwanted,
			pages_per_huge_page(pool->h));
	folio_put(folio);
	KUNIT_EXPECT_FALSE(test, folio_test_hugetlb_zeroed(pool->folio));
}

/* The folio for a hugetlb memfd that is pinned, not mapped. */
static void pool_reserve(struct kunit *test)
{
	struct pool *pool = test->priv;
	struct folio *folio;
	unsigned int i;

	for (i = 0; i < 2; i++) {
		pool_set(pool, i ? DIRT : 0, i ? 0 : FREED);

		spin_lock_irq(&hugetlb_lock);
		pool->h->resv_huge_pages++;
		spin_unlock_irq(&hugetlb_lock);

		folio = alloc_hugetlb_folio_reserve(pool->h,
				folio_nid(pool->folio), NULL,
				htlb_alloc_mask(pool->h) | __GFP_ZERO);
		KUNIT_ASSERT_PTR_EQ(test, folio, pool->folio);
		KUNIT_EXPECT_FALSE(test, folio_test_hugetlb_zeroed(folio));
		KUNIT_EXPECT_EQ(test, pool_differs(pool, 0), 0);
		folio_put(folio);
	}
}

/* The pool shrinks: what is known of the folio is not lost. */
static void pool_shrink(struct kunit *test)
{
	struct pool *pool = test->priv;
	unsigned long set;

	pool_set(pool, 0, REPORTED);
	set = count_of(PGZEROED_SET_FREED);
	pool_resize(pool, 0);
	KUNIT_EXPECT_GE(test, count_of(PGZEROED_SET_FREED) - set,
			pages_per_huge_page(pool->h));

	pool_resize(pool, 1);
	pool->folio = pool_look(pool);
	KUNIT_ASSERT_NOT_NULL(test, pool->folio);
	pool_set(pool, DIRT, 0);
	set = count_of(PGZEROED_SET_FREED);
	pool_resize(pool, 0);
	KUNIT_EXPECT_LT(test, count_of(PGZEROED_SET_FREED) - set,
			pages_per_huge_page(pool->h));
}

/* Who was caught lying is not believed about what is in the pool either. */
static void pool_distrust(struct kunit *test)
{
	struct pool *pool = test->priv;
	struct folio *folio;

	pool_set(pool, DIRT, REPORTED);
	WRITE_ONCE(page_zeroed_distrusted, REPORTED);

	folio = pool_alloc(test, __GFP_ZERO);
	KUNIT_EXPECT_EQ(test, pool_differs(pool, 0), 0);
	folio_put(folio);
}

static void fake_report(struct page *page, unsigned int order,
			unsigned int sources, struct page *bad,
			unsigned int offset)
{
	struct kunit *test = kunit_get_current_test();
	struct pool *pool = test->priv;

	pool->reports++;
	pool->sources = sources;
}

static void verify_restore(void *interval)
{
	WRITE_ONCE(page_zeroed_verify_interval, (uintptr_t)interval);
	if (!page_zeroed_verify_interval)
		static_branch_disable(&page_zeroed_verify_enabled);
}

/* The check finds what is in the pool and not zero, once. */
static void pool_verify(struct kunit *test)
{
	uintptr_t interval = READ_ONCE(page_zeroed_verify_interval);
	struct pool *pool = test->priv;
	struct folio *folio;
	int err;

	err = kunit_add_action_or_reset(test, verify_restore, (void *)interval);
	KUNIT_ASSERT_EQ(test, err, 0);
	WRITE_ONCE(page_zeroed_verify_interval, 1);
	static_branch_enable(&page_zeroed_verify_enabled);
	kunit_activate_static_stub(test, page_zeroed_report, fake_report);

	pool_set(pool, 0, REPORTED);
	memset_page(folio_page(pool->folio, folio_nr_pages(pool->folio) - 1),
		    PAGE_SIZE - 1, DIRT, 1);
	folio = pool_alloc(test, __GFP_ZERO);
	KUNIT_EXPECT_EQ(test, pool->reports, 1);
	KUNIT_EXPECT_EQ(test, pool->sources, REPORTED);
	KUNIT_EXPECT_EQ(test, page_zeroed_distrusted, BOTH);
	KUNIT_EXPECT_EQ(test, pool_differs(pool, 0), 0);
	folio_put(folio);

	pool_set(pool, DIRT, FREED);
	folio = pool_alloc(test, __GFP_ZERO);
	KUNIT_EXPECT_EQ(test, pool->reports, 1);
	KUNIT_EXPECT_EQ(test, pool_differs(pool, 0), 0);
	folio_put(folio);
}

struct stop_at {
	struct kunit *test;
	unsigned int calls, at;
	bool take;		/* instead of stopping */
	struct folio *taken;
};

static bool stop_at(void *data)
{
	struct stop_at *stop = data;

	if (++stop->calls != stop->at)
		return false;
	if (!stop->take)
		return true;

	/* Somebody wants it just now, to copy something over it. */
	stop->taken = pool_alloc(stop->test, 0);
	pool_set(stop->test->priv, DIRT, 0);
	return false;
}

/* A free folio is zeroed in the background, and then is known to be zero. */
static void pool_zero_free(struct kunit *test)
{
	struct pool *pool = test->priv;
	const int nid = folio_nid(pool->folio);
	struct folio *folio;

	pool_set(pool, DIRT, 0);
	KUNIT_EXPECT_EQ(test, hugetlb_zero_free(pool->h, nid, NULL, NULL),
			pages_per_huge_page(pool->h));
	KUNIT_EXPECT_EQ(test, hugetlb_zeroed_sources(pool->folio),
			BIT(PAGE_ZEROED_PREZEROED));
	KUNIT_EXPECT_EQ(test, pool_differs(pool, 0), 0);

	/* There is nothing more to be done. */
	KUNIT_EXPECT_EQ(test, hugetlb_zero_free(pool->h, nid, NULL, NULL), 0);

	folio = pool_alloc(test, __GFP_ZERO);
	folio_put(folio);
}

/* It was told to stop half-way: nothing is known. */
static void pool_zero_stopped(struct kunit *test)
{
	struct pool *pool = test->priv;
	const int nid = folio_nid(pool->folio);
	struct stop_at stop = { .test = test, .at = 50 };

	pool_set(pool, DIRT, 0);
	KUNIT_EXPECT_EQ(test, hugetlb_zero_free(pool->h, nid, stop_at, &stop),
			-EINTR);
	KUNIT_EXPECT_EQ(test, stop.calls, stop.at);
	KUNIT_EXPECT_FALSE(test, folio_test_hugetlb_zeroed(pool->folio));
	KUNIT_EXPECT_GT(test, pool_differs(pool, 0), 0);

	KUNIT_EXPECT_GT(test, hugetlb_zero_free(pool->h, nid, NULL, NULL), 0);
}

/* It was taken half-way: what its owner writes stays. */
static void pool_zero_taken(struct kunit *test)
{
	struct pool *pool = test->priv;
	const int nid = folio_nid(pool->folio);
	struct stop_at stop = { .test = test, .at = 50, .take = true };

	pool_set(pool, DIRT, 0);
	KUNIT_EXPECT_EQ(test, hugetlb_zero_free(pool->h, nid, stop_at, &stop),
			-EAGAIN);
	KUNIT_EXPECT_EQ(test, stop.calls, stop.at);
	KUNIT_ASSERT_NOT_NULL(test, stop.taken);
	KUNIT_EXPECT_EQ(test, pool_differs(pool, DIRT), 0);
	KUNIT_EXPECT_FALSE(test, folio_test_hugetlb_zeroed(pool->folio));
	folio_put(stop.taken);
}

static struct kunit_case pool_cases[] = {
	KUNIT_CASE_PARAM(pool_hand_out, alloc_gen_params),
	KUNIT_CASE(pool_used),
	KUNIT_CASE(pool_migrate),
	KUNIT_CASE(pool_reserve),
	KUNIT_CASE(pool_shrink),
	KUNIT_CASE(pool_zero_free),
	KUNIT_CASE(pool_zero_stopped),
	KUNIT_CASE(pool_zero_taken),
	KUNIT_CASE(pool_distrust),
	KUNIT_CASE(pool_verify),
	{}
};

static struct kunit_suite pool_suite = {
	.name = "page_zeroed_hugetlb_pool",
	.init = pool_init,
	.exit = pool_exit,
	.test_cases = pool_cases,
};

kunit_test_suites(&flag_suite, &pool_suite);
