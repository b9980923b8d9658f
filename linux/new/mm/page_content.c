// SPDX-License-Identifier: GPL-2.0
/*
 * Pages that start with something else than zeros: what struct page_content
 * describes is written here, once, before the page leaves the allocator.
 */
#include <linux/highmem.h>
#include <linux/kmsan.h>
#include <linux/page_tags.h>
#include <linux/string.h>

#include "page_alloc.h"

/* The shortest power of two of bytes, up to @size, after which @data repeats. */
static size_t content_period(const void *data, size_t size)
{
	while (size > 1 && !memcmp(data, data + size / 2, size / 2))
		size /= 2;

	return size;
}

/**
 * page_content_describe - Find the cheapest way to make copies of a page
 * @content: to be filled in, except for its @user_addr
 * @page: page with the content and maybe memory tags, in lowmem; must stay as it
 *	is and outlive @content if that turns out as PAGE_CONTENT_PAGE
 *
 * Context: Any context. Reads the whole page at most twice.
 */
void page_content_describe(struct page_content *content, struct page *page)
{
	const void *data = page_address(page);
	size_t period = content_period(data, PAGE_SIZE);
	int tag = page_tags_of(page);
	size_t i;

	/* The usual content of memory with tags, which are all the same then. */
	if (tag > 0 && period == 1 && !*(const u8 *)data) {
		content->kind = PAGE_CONTENT_TAGGED;
		content->word = tag;
		return;
	}

	if (tag || period > sizeof(content->word)) {
		content->kind = PAGE_CONTENT_PAGE;
		content->page = page;
		return;
	}

	/* In memory order, as memset64() will store it, whatever the endianness. */
	for (i = 0; i < sizeof(content->word); i += period)
		memcpy((char *)&content->word + i, data, period);

	if (!content->word)
		content->kind = PAGE_CONTENT_ZERO;
	else if (period == 1)
		content->kind = PAGE_CONTENT_BYTE;
	else
		content->kind = PAGE_CONTENT_WORD;
}

/**
 * page_content_fill - Give a page the content that was asked for
 * @page: page that nobody else can see yet
 * @content: what it is to hold
 *
 * The page is initialised whatever happens: if the page to be copied is lost to
 * a memory error, it becomes zero, and the caller learns it from @unreadable.
 *
 * Context: Any context. Uses two local mappings at most.
 */
void page_content_fill(struct page *page, const struct page_content *content)
{
	void *kaddr;

	switch (content->kind) {
	case PAGE_CONTENT_BYTE:
		kaddr = kmap_local_page(page);
		memset(kaddr, (u8)content->word, PAGE_SIZE);
		kunmap_local(kaddr);
		break;
	case PAGE_CONTENT_WORD:
		kaddr = kmap_local_page(page);
		memset64(kaddr, content->word, PAGE_SIZE / sizeof(content->word));
		kunmap_local(kaddr);
		break;
	case PAGE_CONTENT_TAGGED:
		page_tags_zero(page, content->word);
		break;
	case PAGE_CONTENT_PAGE:
		/* With the tags, if there are any. */
		if (!PageHWPoison(content->page) &&
		    !copy_mc_highpage(page, content->page))
			break;
		if (content->unreadable)
			*content->unreadable = true;
		fallthrough;
	case PAGE_CONTENT_ZERO:
		clear_highpage(page);
		break;
	}

	flush_dcache_page(page);
}
