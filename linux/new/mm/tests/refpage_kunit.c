// SPDX-License-Identifier: GPL-2.0
/*
 * KUnit tests for pages with other content than zeros: how a page is described,
 * and that the page allocator fills pages with exactly that, once.
 */
#include <kunit/test.h>

#include <linux/gfp.h>
#include <linux/highmem.h>
#include <linux/memcontrol.h>
#include <linux/mm.h>
#include <linux/page_tags.h>
#include <linux/rcupdate.h>
#include <linux/string.h>
#include <linux/vmstat.h>

#include "../internal.h"
#include "../page_alloc.h"

/* What pages are full of that are freed to be allocated again. */
#define DIRT		0x5a

struct pattern {
	const char *desc;
	u8 bytes[32];
	size_t size;
	/* One byte that breaks the pattern, and its place; none if 0. */
	size_t odd_at;
	u8 odd;
	enum page_content_kind kind;
};

static const struct pattern patterns[] = {
	{ "zero", { 0 }, 1, 0, 0, PAGE_CONTENT_ZERO },
	{ "zero, several", { 0 }, 32, 0, 0, PAGE_CONTENT_ZERO },
	{ "one byte", { 0xaa }, 1, 0, 0, PAGE_CONTENT_BYTE },
	{ "one byte, twice", { 0x11, 0x11 }, 2, 0, 0, PAGE_CONTENT_BYTE },
	{ "all ones", { 0xff }, 1, 0, 0, PAGE_CONTENT_BYTE },
	{ "two bytes", { 1, 2 }, 2, 0, 0, PAGE_CONTENT_WORD },
	{ "two bytes, the first is zero", { 0, 2 }, 2, 0, 0, PAGE_CONTENT_WORD },
	{ "four bytes", { 0xde, 0xad, 0xbe, 0xef }, 4, 0, 0, PAGE_CONTENT_WORD },
	{ "eight bytes", { 1, 2, 3, 4, 5, 6, 7, 8 }, 8, 0, 0,
	  PAGE_CONTENT_WORD },
	{ "eight bytes, only the last not zero", { 0, 0, 0, 0, 0, 0, 0, 1 }, 8,
	  0, 0, PAGE_CONTENT_WORD },
	{ "sixteen bytes that are eight", { 1, 2, 3, 4, 5, 6, 7, 8,
	  1, 2, 3, 4, 5, 6, 7, 8 }, 16, 0, 0, PAGE_CONTENT_WORD },
	{ "sixteen bytes", { 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 9 },
	  16, 0, 0, PAGE_CONTENT_PAGE },
	{ "sixteen bytes, only the last not zero", { [15] = 1 }, 16, 0, 0,
	  PAGE_CONTENT_PAGE },
	{ "one byte, another last", { 0xaa }, 1, PAGE_SIZE - 1, 0xab,
	  PAGE_CONTENT_PAGE },
	{ "zero, but not in the middle", { 0 }, 1, PAGE_SIZE / 2, 1,
	  PAGE_CONTENT_PAGE },
	{ "eight bytes, another before the middle", { 1, 2, 3, 4, 5, 6, 7, 8 },
	  8, PAGE_SIZE / 2 - 1, 9, PAGE_CONTENT_PAGE },
	{ "eight bytes, another in the second word", { 1, 2, 3, 4, 5, 6, 7, 8 },
	  8, 9, 0, PAGE_CONTENT_PAGE },
};

static void pattern_desc(const struct pattern *pattern, char *desc)
{
	strscpy(desc, pattern->desc, KUNIT_PARAM_DESC_SIZE);
}

KUNIT_ARRAY_PARAM(pattern, patterns, pattern_desc);

struct refpage_test {
	struct page *page;	/* holds the pattern */
	struct page_content content;
};

static int refpage_test_init(struct kunit *test)
{
	const struct pattern *pattern = test->param_value;
	struct refpage_test *ctx;
	size_t i;
	u8 *data;

	ctx = kunit_kzalloc(test, sizeof(*ctx), GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, ctx);
	test->priv = ctx;

	ctx->page = alloc_page(GFP_KERNEL);
	KUNIT_ASSERT_NOT_NULL(test, ctx->page);

	data = page_address(ctx->page);
	for (i = 0; i < PAGE_SIZE; i++)
		data[i] = pattern->bytes[i % pattern->size];
	if (pattern->odd_at)
		data[pattern->odd_at] = pattern->odd;

	/* What it finds there must not matter. */
	memset(&ctx->content.word, DIRT, sizeof(ctx->content.word));
	ctx->content.kind = PAGE_CONTENT_PAGE;
	page_content_describe(&ctx->content, ctx->page);

	return 0;
}

static void refpage_test_exit(struct kunit *test)
{
	struct refpage_test *ctx = test->priv;

	if (ctx && ctx->page)
		__free_page(ctx->page);
}

static void content_is_described(struct kunit *test)
{
	const struct pattern *pattern = test->param_value;
	struct refpage_test *ctx = test->priv;

	KUNIT_EXPECT_EQ(test, ctx->content.kind, pattern->kind);
	if (pattern->kind == PAGE_CONTENT_PAGE)
		KUNIT_EXPECT_PTR_EQ(test, ctx->content.page, ctx->page);
}

static void content_is_filled(struct kunit *test)
{
	struct refpage_test *ctx = test->priv;
	struct page *page = alloc_page(GFP_KERNEL);

	KUNIT_ASSERT_NOT_NULL(test, page);
	memset(page_address(page), DIRT, PAGE_SIZE);

	page_content_fill(page, &ctx->content);
	KUNIT_EXPECT_MEMEQ(test, page_address(page), page_address(ctx->page),
			   PAGE_SIZE);

	__free_page(page);
}

/* Fill some memory with dirt and free it, so that it is likely what comes next. */
static void soil_free_memory(struct kunit *test)
{
	struct page *pages[8];
	int i;

	for (i = 0; i < ARRAY_SIZE(pages); i++) {
		pages[i] = alloc_page(GFP_KERNEL);
		KUNIT_ASSERT_NOT_NULL(test, pages[i]);
		memset(page_address(pages[i]), DIRT, PAGE_SIZE);
	}
	for (i = 0; i < ARRAY_SIZE(pages); i++)
		__free_page(pages[i]);
}

/* Pages come with the content, and nobody has to ask for zeros to get them. */
static void content_is_allocated(struct kunit *test, unsigned int order)
{
	struct refpage_test *ctx = test->priv;
	const bool zero = ctx->content.kind == PAGE_CONTENT_ZERO;
	gfp_t gfp = GFP_KERNEL | __GFP_COMP | (zero ? __GFP_ZERO : 0);
	struct page *page;
	int i;

	soil_free_memory(test);
	page = __alloc_frozen_pages(gfp, order, numa_mem_id(), NULL,
				    ALLOC_DEFAULT, &ctx->content);
	KUNIT_ASSERT_NOT_NULL(test, page);

	for (i = 0; i < 1 << order; i++)
		KUNIT_EXPECT_MEMEQ(test, page_address(page + i),
				   page_address(ctx->page), PAGE_SIZE);

	free_frozen_pages(page, order);
}

static void page_is_allocated(struct kunit *test)
{
	content_is_allocated(test, 0);
}

static void block_is_allocated(struct kunit *test)
{
	const struct refpage_test *ctx = test->priv;

	if (ctx->content.kind == PAGE_CONTENT_ZERO &&
	    !IS_ENABLED(CONFIG_TRANSPARENT_HUGEPAGE) &&
	    !IS_ENABLED(CONFIG_HUGETLBFS))
		kunit_skip(test, "nobody zeroes large folios for users here");

	content_is_allocated(test, 3);
}

#ifdef CONFIG_PAGE_ZEROED
static unsigned long count_of(enum vm_event_item item)
{
	static unsigned long events[NR_VM_EVENT_ITEMS];

	all_vm_events(events);
	return events[item];
}

/* With init_on_alloc=1 as well: no page is zeroed to be filled afterwards. */
static void pattern_is_not_zeroed_first(struct kunit *test)
{
	struct refpage_test *ctx = test->priv;
	const unsigned int order = 5;
	const int nr_blocks = 16;
	unsigned long before;
	struct page *page;
	int i;

	if (ctx->content.kind == PAGE_CONTENT_ZERO)
		kunit_skip(test, "this one is to be zeroed");

	before = count_of(PGZEROED_CLEARED);
	for (i = 0; i < nr_blocks; i++) {
		page = __alloc_frozen_pages(GFP_KERNEL | __GFP_COMP, order,
					    numa_mem_id(), NULL, ALLOC_DEFAULT,
					    &ctx->content);
		KUNIT_ASSERT_NOT_NULL(test, page);
		free_frozen_pages(page, order);
	}

	/* Others allocate meanwhile, but hardly that much. */
	KUNIT_EXPECT_LT(test, count_of(PGZEROED_CLEARED) - before,
			(unsigned long)nr_blocks << order);
}
#endif

static struct kunit_case refpage_test_cases[] = {
	KUNIT_CASE_PARAM(content_is_described, pattern_gen_params),
	KUNIT_CASE_PARAM(content_is_filled, pattern_gen_params),
	KUNIT_CASE_PARAM(page_is_allocated, pattern_gen_params),
	KUNIT_CASE_PARAM(block_is_allocated, pattern_gen_params),
#ifdef CONFIG_PAGE_ZEROED
	KUNIT_CASE_PARAM(pattern_is_not_zeroed_first, pattern_gen_params),
#endif
	{}
};

static struct kunit_suite refpage_test_suite = {
	.name = "refpage",
	.init = refpage_test_init,
	.exit = refpage_test_exit,
	.test_cases = refpage_test_cases,
};

/*
 * Memory tags, where there are any.
 */

#define TAG		5

static void expect_tagged(struct kunit *test, struct page *page)
{
	KUNIT_EXPECT_EQ(test, page_tags_of(page), TAG);
}

static struct page *alloc_described(const struct page_content *content)
{
	return __alloc_frozen_pages(GFP_USER | __GFP_SKIP_KASAN, 0, numa_mem_id(),
				    NULL, ALLOC_DEFAULT, content);
}

static void tags_are_kept(struct kunit *test)
{
	struct page_content content = {};
	struct page *page, *made;
	u8 *data;

	page = alloc_page(GFP_USER | __GFP_SKIP_KASAN);
	KUNIT_ASSERT_NOT_NULL(test, page);
	data = page_address(page);
	memset(data, DIRT, PAGE_SIZE);

	page_tags_zero(page, TAG);
	if (!page_tags_of(page)) {
		__free_page(page);
		kunit_skip(test, "no memory tags");
	}
	KUNIT_EXPECT_NULL(test, memchr_inv(data, 0, PAGE_SIZE));
	expect_tagged(test, page);

	/* Zeros with one tag are made in one go. */
	page_content_describe(&content, page);
	KUNIT_EXPECT_EQ(test, content.kind, PAGE_CONTENT_TAGGED);
	KUNIT_EXPECT_EQ(test, content.word, TAG);
	made = alloc_described(&content);
	KUNIT_EXPECT_NOT_NULL(test, made);
	if (made) {
		KUNIT_EXPECT_NULL(test, memchr_inv(page_address(made), 0, PAGE_SIZE));
		expect_tagged(test, made);
		free_frozen_pages(made, 0);
	}

	/* Anything else is copied with its tags, bytes that repeat as well. */
	memset(data, DIRT, PAGE_SIZE);
	page_content_describe(&content, page);
	KUNIT_EXPECT_EQ(test, content.kind, PAGE_CONTENT_PAGE);
	made = alloc_described(&content);
	KUNIT_EXPECT_NOT_NULL(test, made);
	if (made) {
		KUNIT_EXPECT_MEMEQ(test, page_address(made), data, PAGE_SIZE);
		expect_tagged(test, made);
		free_frozen_pages(made, 0);
	}

	__free_page(page);
}

static struct kunit_case refpage_tags_test_cases[] = {
	KUNIT_CASE(tags_are_kept),
	{}
};

static struct kunit_suite refpage_tags_test_suite = {
	.name = "refpage_tags",
	.test_cases = refpage_tags_test_cases,
};

/*
 * Use of what is never reclaimed.
 */

#define USES		100000

/* How much older @folio's being used makes what its lruvec has reclaimed. */
static long aged_by_use(struct folio *folio)
{
	atomic_long_t *age;
	long before;
	int i;

	guard(rcu)();
	age = &folio_lruvec(folio)->nonresident_age;
	before = atomic_long_read(age);
	for (i = 0; i < USES; i++)
		workingset_activation(folio);

	return atomic_long_read(age) - before;
}

static void page_of_no_mapping_ages_nothing(struct kunit *test)
{
	struct folio *folio = folio_alloc(GFP_KERNEL, 0);
	struct address_space mapping = {};

	KUNIT_ASSERT_NOT_NULL(test, folio);
	KUNIT_ASSERT_EQ(test, mem_cgroup_charge(folio, NULL, GFP_KERNEL), 0);

	/* Others may use something meanwhile, but not that often. */
	KUNIT_EXPECT_LT(test, aged_by_use(folio), USES);

	folio->mapping = &mapping;
	KUNIT_EXPECT_GE(test, aged_by_use(folio), USES);
	folio->mapping = NULL;

	folio_put(folio);
}

static struct kunit_case refpage_use_test_cases[] = {
	KUNIT_CASE(page_of_no_mapping_ages_nothing),
	{}
};

static struct kunit_suite refpage_use_test_suite = {
	.name = "refpage_use",
	.test_cases = refpage_use_test_cases,
};

kunit_test_suites(&refpage_test_suite, &refpage_tags_test_suite,
		  &refpage_use_test_suite);

MODULE_DESCRIPTION("KUnit tests for pages with other content than zeros");
MODULE_LICENSE("GPL");
