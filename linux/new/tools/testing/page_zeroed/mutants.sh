#!/bin/sh
# SPDX-License-Identifier: GPL-2.0
#
# Break the extracted functions, one after the other, and see whether that is
# noticed. Exits with 1 if it is not, or if a mutation no longer applies.

set -u
: "${ROUNDS:=2000}" "${CC:=cc}" "${CFLAGS:?run make mutants}"
failed=0

# mutant DESCRIPTION FILE SED-SCRIPT
mutant() {
	rm -rf mutant
	cp -r generated mutant
	sed "$3" "generated/$2" > "mutant/$2"
	if cmp -s "generated/$2" "mutant/$2"; then
		echo "NOT APPLIED  $1"
		failed=1
		return
	fi

	# The last -I of two would lose, so put ours first.
	if ! $CC -Imutant $CFLAGS -o mutant/page_zeroed main.c; then
		echo "NOT BUILT    $1"
		failed=1
		return
	fi

	out=$(./mutant/page_zeroed 1 "$ROUNDS" | grep '^BROKEN' | head -n 1)
	if [ -z "$out" ]; then
		echo "NOT NOTICED  $1"
		failed=1
		return
	fi
	echo "noticed      $1"
	echo "             ${out#BROKEN }"
}

# What cannot be trusted is a base for nothing.
if ! ./page_zeroed 1 "$ROUNDS" > /dev/null; then
	echo "The code fails as it is: run make run first"
	exit 1
fi

mutant "count: what leaves is still counted" page_zeroed.h \
	's/page_zeroed_account(page, -(1L << order))/(void)0/'
mutant "count: what is lost is still counted" functions.h \
	'/^void page_zeroed_lose/,/^}/s/page_zeroed_account(page, -(1L << order))/(void)0/'
mutant "count: a block counts as one page" functions.h \
	's/page_zeroed_account(page, 1L << order)/page_zeroed_account(page, 1)/'
mutant "isolate: the mark is lost" functions.h \
	'/^bool isolate_untouched_block/,/^}/s/return true;/page_zeroed_take(page); return true;/'
mutant "choose: zeros for those who want none" functions.h \
	's/(alloc_flags & ALLOC_ZEROED) &&/true \&\&/'
mutant "choose: what the host has is preferred" page_zeroed.h \
	's/return sources && !(sources & absent)/return sources/'
mutant "choose: zeros are not preferred" page_zeroed.h \
	's/return sources && !(sources & absent)/return false/'
mutant "merge: one zero half is enough" page_zeroed.h \
	's/if (a && b)/if (a || b)/'
mutant "merge: never known zero" page_zeroed.h \
	's/if (a && b)/if (0)/'
mutant "merge: the mark stays on the page" page_zeroed.h \
	's/a = page_zeroed_take(page)/a = page_zeroed_sources(page)/'
mutant "merge: the mark stays on the buddy" page_zeroed.h \
	's/b = page_zeroed_take(buddy)/b = page_zeroed_sources(buddy)/'
mutant "merge: the page is marked, not the merged head" page_zeroed.h \
	's/page_zeroed_mark(merged, a | b)/page_zeroed_mark(page, a | b)/'
mutant "merge: one of the sources is forgotten" page_zeroed.h \
	's/page_zeroed_mark(merged, a | b)/page_zeroed_mark(merged, a)/'
mutant "merge: not looked at when blocks merge" functions.h \
	's/^\t\tpage_zeroed_merge(.*/\t\t;/'
mutant "merge: the head is that of the buddy" functions.h \
	'/page_zeroed_merge(/s/page + (combined_pfn - pfn)/buddy/'
mutant "split: expand() does not mark the parts" functions.h \
	's/^\t\tpage_zeroed_split(page, &page\[size\]);/\t\t;/'
mutant "split: the whole loses its mark" page_zeroed.h \
	'/page_zeroed_mark(part, /s/_sources(page)/_take((struct page *)page)/'
mutant "split_large_buddy(): marked when already freed" functions.h \
	'/^static void split_large_buddy/,/^}/{/^\t\tpage_zeroed_mark(page, zeroed);/d
s/^\t\t__free_one_page(.*/&\n\t\tpage_zeroed_mark(page, zeroed);/}'
mutant "split_large_buddy(): the parts are not marked" functions.h \
	'/^static void split_large_buddy/,/^}/s/^\t\tpage_zeroed_mark(page, zeroed);/\t\t;/'
mutant "split_large_buddy(): the next part is marked" functions.h \
	'/^static void split_large_buddy/,/^}/{
s/^\t\tpage_zeroed_mark(page, zeroed);/\t\tpage_zeroed_mark(page + (1 << order), zeroed);/
}'
mutant "take off: the mark stays where it was" functions.h \
	'/^static void break_down_buddy_pages/,/^}/{
s/page_zeroed_take(page)/page_zeroed_sources(page)/
}'
mutant "take off: the parts are not marked" functions.h \
	'/^static void break_down_buddy_pages/,/^}/s/^\t\tpage_zeroed_mark(.*/\t\t;/'
mutant "take off: guard pages are marked" functions.h \
	'/^static void break_down_buddy_pages/,/^}/{
/^\t\tif (set_page_guard(/i\
		page_zeroed_mark(current_buddy, zeroed);
}'
mutant "contiguous: the first block vouches for all" functions.h \
	'/^static void merge_free_frozen_pages/,/^}/{
s/if (nr_zeroed == nr_pages)/if (page_zeroed_sources(head) || zeroed)/
}'
mutant "contiguous: never known zero" functions.h \
	'/^static void merge_free_frozen_pages/,/^}/s/if (nr_zeroed == nr_pages)/if (0)/'
mutant "contiguous: other heads keep their marks" functions.h \
	'/^static void merge_free_frozen_pages/,/^}/{
s/page_zeroed_take(page)/page_zeroed_sources(page)/
}'
mutant "contiguous: not looked at" functions.h \
	'/^static void merge_free_frozen_pages/,/^}/s/if (!page_zeroed_tracked())/if (1)/'
mutant "contiguous: a part is what its first block is" functions.h \
	'/^static unsigned int take_free_frozen_pages/,/^}/{
s/bitmap_set(dirty, first, last - first + 1)/bitmap_set(dirty, first, 1)/
}'
mutant "contiguous: all parts are dirty" functions.h \
	'/^static unsigned int take_free_frozen_pages/,/^}/s/return nr_used ? zeroed : 0/return 0/'
mutant "contiguous: no part is dirty" functions.h \
	'/^static unsigned int take_free_frozen_pages/,/^}/s/^\t\t\t\tbitmap_set(.*/\t\t\t\t;/'
mutant "contiguous: heads of parts keep their marks" functions.h \
	'/^static unsigned int take_free_frozen_pages/,/^}/{
s/page_zeroed_detach(page, i)/page_zeroed_sources(page)/
}'
mutant "allocation: the mark stays" page_zeroed.h \
	's/^\(\tunsigned int sources = page_zeroed_\)take(page);/\1sources(page);/'
mutant "allocation: never taken for zero" page_zeroed.h \
	's/^\tif (sources && page_zeroed_consume(page, order, sources, wanted))/\tif (0)/'
mutant "allocation: liars are believed" functions.h \
	'/^bool page_zeroed_consume/,/^}/{
s/if (unlikely(READ_ONCE(page_zeroed_distrusted) & sources))/if (0)/
}'
mutant "claim: liars are believed" functions.h \
	's/if (!page_zeroed_trusted(source))/if (0)/'
mutant "claim: what was known before stays" functions.h \
	'/^void page_zeroed_claim/,/^}/{
s/known = page_zeroed_take(page);/known = false; sources |= page_zeroed_take(page);/
}'
mutant "free: everything is zero" functions.h \
	'/^static void __free_pages_ok/,/^}/s/if (fpi_flags & FPI_ZEROED)/if (1)/'
mutant "free: the host's word passes for the kernel's own" functions.h \
	'/^static void __free_pages_ok/,/^}/s/fpi_flags & FPI_INFLATED/0/'
mutant "free: zeros are forgotten" functions.h \
	'/^static void __free_pages_ok/,/^}/s/if (fpi_flags & FPI_ZEROED)/if (0)/'
mutant "free: what was queued goes by the flags of others" functions.h \
	'/^static void free_one_page/,/^}/{
/unsigned int p_order = p->private;/a\
			if (fpi_flags & FPI_ZEROED)\
				page_zeroed_mark(p, BIT(PAGE_ZEROED_FREED));
}'
mutant "report: what is not confirmed keeps its mark" functions.h \
	's/^\t\t\tpage_zeroed_drop(page, order, PAGE_ZEROED_LOST_REPORT);/\t\t\t;/'
mutant "report: the answer counts though it failed" functions.h \
	's/if (reported && prdev->tells_zeroed &&/if (prdev->tells_zeroed \&\&/'
mutant "report: all devices are believed" functions.h \
	's/if (reported && prdev->tells_zeroed &&/if (reported \&\&/'
mutant "report: the answer is that for the next block" functions.h \
	's/test_bit(i, prdev->zeroed)/test_bit(i + 1, prdev->zeroed)/'
mutant "report: told after it was put back" functions.h \
	'/page_reporting_drain(/,/^}/{/^\t\tif (reported && prdev->tells_zeroed/i\
		__putback_isolated_page(page, order, mt);
/^\t\t__putback_isolated_page(page, order, mt);/d}'
mutant "reported: parts of a block that was not" functions.h \
	'/^static.* expand(/,/^}/{
s/page_reporting_inherit(&page\[size\], reported)/page_reporting_inherit(\&page[size], true)/
}'
mutant "compaction: all that it gives back is zero" functions.h \
	'/^void putback_untouched_block/,/^}/s/split_large_buddy(/page_zeroed_mark(page, 1);\n\t&/
/release_free_list(/,/^}/s/if (page_zeroed_sources(page) && .*)/if (1)/'
mutant "compaction: what it gives back is not zero" functions.h \
	'/release_free_list(/,/^}/s/if (page_zeroed_sources(page) && .*)/if (0)/'
mutant "resume: some is not forgotten" functions.h \
	'/^void page_zeroed_forget_all/,/^}/s/order = 0; order/order = 1; order/'

rm -rf mutant
exit $failed
