// SPDX-License-Identifier: GPL-2.0
/*
 * KUnit tests for kzeropaged: which free blocks it takes, and in which order, on
 * free lists of struct pages that no memory belongs to.
 */
#include <kunit/test.h>

#include <linux/list.h>
#include <linux/mm.h>
#include <linux/mmzone.h>
#include <linux/page_zeroed.h>
#include <linux/sizes.h>
#include <linux/time64.h>

#include "../internal.h"
#include "../page_reporting.h"
#include "../page_zeroed.h"
#include "../prezero.h"

#define NR_LISTS	(MAX_NR_ZONES * NR_PAGE_ORDERS * MIGRATE_TYPES)
#define NR_SKIPPED	(1 + IS_ENABLED(CONFIG_MEMORY_ISOLATION) + IS_ENABLED(CONFIG_CMA))
#define MAX_BLOCKS	16

static int prezero_test_init(struct kunit *test)
{
	struct page *pages;
	unsigned int i;

	if (page_zeroed_enable())
		kunit_skip(test, "known-zero pages are not tracked: %s",
			   page_zeroed_obstacle());

	pages = kunit_kcalloc(test, MAX_BLOCKS, sizeof(*pages), GFP_KERNEL);
	if (!pages)
		return -ENOMEM;

	for (i = 0; i < MAX_BLOCKS; i++)
		pages[i].page_type = UINT_MAX;

	test->priv = pages;
	return 0;
}

struct orders_param {
	const char *desc;
	unsigned int min_order, end_order;
	unsigned int nr;	/* lists in each zone */
};

#define LISTS_OF(nr_orders)	((nr_orders) * (MIGRATE_TYPES - NR_SKIPPED))

static const struct orders_param orders_params[] = {
	{ "all", 0, NR_PAGE_ORDERS, LISTS_OF(NR_PAGE_ORDERS) },
	{ "the highest", MAX_PAGE_ORDER, NR_PAGE_ORDERS, LISTS_OF(1) },
	{ "the lowest", 0, 1, LISTS_OF(1) },
	{ "below those that are reported", 4, 9, LISTS_OF(5) },
	{ "all are reported", 0, 0, 0 },
	{ "all that are large enough are reported", 5, 5, 0 },
	{ "smaller ones are reported as well", 9, 4, 0 },
	{ "reported from an order that there is not", 3, UINT_MAX,
	  LISTS_OF(NR_PAGE_ORDERS - 3) },
};
KUNIT_ARRAY_PARAM_DESC(orders, orders_params, desc);

static void prezero_lists(struct kunit *test)
{
	const struct orders_param *param = test->param_value;
	unsigned int nr = 0, last_order = 0;
	int list, last_zone = -1;

	for (list = 0; ; list++) {
		unsigned int order;
		int zone;

		list = prezero_next_list(list, param->min_order,
					 param->end_order);
		if (list >= NR_LISTS)
			break;

		nr++;
		zone = list / (NR_PAGE_ORDERS * MIGRATE_TYPES);
		order = MAX_PAGE_ORDER - list / MIGRATE_TYPES % NR_PAGE_ORDERS;
		KUNIT_EXPECT_GE(test, order, param->min_order);
		KUNIT_EXPECT_LT(test, order, param->end_order);
		KUNIT_EXPECT_NE(test, list % MIGRATE_TYPES, MIGRATE_HIGHATOMIC);
		KUNIT_EXPECT_FALSE(test, is_migrate_isolate(list % MIGRATE_TYPES));
		KUNIT_EXPECT_FALSE(test, is_migrate_cma(list % MIGRATE_TYPES));
		/* The largest blocks of each zone come first. */
		if (zone == last_zone)
			KUNIT_EXPECT_LE(test, order, last_order);
		last_zone = zone;
		last_order = order;
	}

	KUNIT_EXPECT_EQ(test, nr, param->nr * MAX_NR_ZONES);
	KUNIT_EXPECT_EQ(test, list, NR_LISTS);
}

/* Blocks are z: known zero, r: reported, d: dirty, and are named by place. */
struct next_param {
	const char *desc;
	const char *blocks;
	unsigned long scans;	/* for each call */
	const char *found;	/* place that each call finds, or '-' */
	const char *left;	/* scans left after each call */
	const char *after;	/* order of what is left on the list */
};

static const struct next_param next_params[] = {
	{ "empty", "", 4, "-", "4", "" },
	{ "all dirty", "ddd", 4, "012-", "3334", "" },
	{ "all zero", "zzz", 4, "--", "11", "012" },
	{ "all reported", "rrr", 4, "--", "11", "012" },
	{ "dirty at the end", "zzzd", 4, "3-", "01", "012" },
	{ "dirty in the middle", "zdz", 4, "1-", "22", "20" },
	{ "reported and zero around it", "rdzdr", 4, "13-", "221", "402" },
	{ "search goes on where it ended", "zzzzzd", 3, "-5-", "000", "34012" },
	{ "ends in front of a dirty one", "zzd", 2, "-2-", "010", "01" },
	{ "no search", "zd", 0, "-", "0", "01" },
	{ "one at a time", "zdzd", 1, "-1-3", "0000", "02" },
};
KUNIT_ARRAY_PARAM_DESC(next, next_params, desc);

static void prezero_finds(struct kunit *test)
{
	const bool reporting = static_key_enabled(&page_reporting_enabled);
	const struct next_param *param = test->param_value;
	struct page *pages = test->priv, *page;
	unsigned int i, n = 0;
	LIST_HEAD(list);

	if (!reporting)
		static_branch_enable(&page_reporting_enabled);

	for (i = 0; param->blocks[i]; i++) {
		if (param->blocks[i] == 'z')
			page_zeroed_mark(&pages[i], BIT(PAGE_ZEROED_PREZEROED));
		if (param->blocks[i] == 'r')
			__SetPageReported(&pages[i]);
		list_add_tail(&pages[i].buddy_list, &list);
	}

	for (i = 0; param->found[i]; i++) {
		unsigned long scans = param->scans;

		page = prezero_next(&list, &scans);
		KUNIT_EXPECT_EQ_MSG(test, scans, param->left[i] - '0',
				    "scans left in call %u", i);
		KUNIT_EXPECT_EQ_MSG(test, page ? '0' + (int)(page - pages) : '-',
				    param->found[i], "found in call %u", i);
		if (!page)
			continue;

		KUNIT_EXPECT_TRUE(test, list_is_first(&page->buddy_list, &list));
		list_del(&page->buddy_list);
	}

	list_for_each_entry(page, &list, buddy_list) {
		KUNIT_EXPECT_EQ_MSG(test, '0' + (int)(page - pages),
				    param->after[n], "place %u afterwards", n);
		if (param->after[n])
			n++;
	}
	KUNIT_EXPECT_EQ(test, param->after[n], '\0');

	if (!reporting)
		static_branch_disable(&page_reporting_enabled);
}

struct debt_param {
	const char *desc;
	unsigned long pages;
	unsigned long rate;
	u64 elapsed_ns;
	unsigned long ms;
};

static const struct debt_param debt_params[] = {
	{ "no limit", SZ_1G >> PAGE_SHIFT, 0, 0, 0 },
	{ "in time", SZ_1M >> PAGE_SHIFT, SZ_1M, NSEC_PER_SEC, 0 },
	{ "late", SZ_1M >> PAGE_SHIFT, SZ_1M, 2 * (u64)NSEC_PER_SEC, 0 },
	{ "early", SZ_1M >> PAGE_SHIFT, SZ_1M, NSEC_PER_SEC / 4, 750 },
	{ "at once", SZ_2M >> PAGE_SHIFT, SZ_1M, 0, 2000 },
	{ "less than a millisecond", SZ_1M >> PAGE_SHIFT, SZ_1M,
	  NSEC_PER_SEC - 1, 0 },
	{ "hardly any", SZ_1G >> PAGE_SHIFT, 1, 0, UINT_MAX },
	{ "hardly any of much", 32 * (SZ_1G >> PAGE_SHIFT), 1, 0, UINT_MAX },
	{ "nothing done", 0, SZ_1M, 0, 0 },
};
KUNIT_ARRAY_PARAM_DESC(debt, debt_params, desc);

static void prezero_rate(struct kunit *test)
{
	const struct debt_param *param = test->param_value;

	KUNIT_EXPECT_EQ(test, prezero_debt_ms(param->pages, param->rate,
					      param->elapsed_ns), param->ms);
}

static void prezero_poison(struct kunit *test)
{
	struct page *pages = test->priv;
	unsigned int i;

	if (!IS_ENABLED(CONFIG_MEMORY_FAILURE))
		kunit_skip(test, "CONFIG_MEMORY_FAILURE is not set");

	KUNIT_EXPECT_FALSE(test, prezero_any_poisoned(pages, 3));
	for (i = 0; i < MAX_BLOCKS; i++) {
		SetPageHWPoison(&pages[i]);
		KUNIT_EXPECT_EQ(test, prezero_any_poisoned(pages, 3), i < 8);
		KUNIT_EXPECT_EQ(test, prezero_any_poisoned(pages, 0), !i);
		ClearPageHWPoison(&pages[i]);
	}
}

static struct kunit_case prezero_cases[] = {
	KUNIT_CASE_PARAM(prezero_lists, orders_gen_params),
	KUNIT_CASE_PARAM(prezero_finds, next_gen_params),
	KUNIT_CASE_PARAM(prezero_rate, debt_gen_params),
	KUNIT_CASE(prezero_poison),
	{}
};

static struct kunit_suite prezero_suite = {
	.name = "page_zeroed_prezero",
	.init = prezero_test_init,
	.test_cases = prezero_cases,
};
kunit_test_suite(prezero_suite);

MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("KUnit tests for kzeropaged");
