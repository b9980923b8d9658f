// SPDX-License-Identifier: GPL-2.0
/*
 * Reference pages: private mappings that start with any content, not only zero.
 *
 * refpage_create(2) copies the content into a page and returns a file. A mapping
 * of the file shows that page at each of its addresses until something is written
 * there: then the address gets an ordinary anonymous page.
 *
 * The reference page is an ordinary page as well, and the mapping one of a file,
 * so nearly all of mm/ knows what to do with them. The page is not in the page
 * cache and on no LRU list; it stays as long as the file or a user of the page.
 *
 * One page can be mapped at any number of addresses, and each takes a reference.
 * Before the count can overflow, another page with the same content takes over.
 */
#include <linux/anon_inodes.h>
#include <linux/err.h>
#include <linux/fcntl.h>
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/gfp.h>
#include <linux/highmem.h>
#include <linux/list.h>
#include <linux/log2.h>
#include <linux/memcontrol.h>
#include <linux/mm.h>
#include <linux/moduleparam.h>
#include <linux/mutex.h>
#include <linux/oom.h>
#include <linux/page-flags.h>
#include <linux/page_tags.h>
#include <linux/pagemap.h>
#include <linux/refpage.h>
#include <linux/slab.h>
#include <linux/syscalls.h>
#include <linux/uaccess.h>
#include <linux/userfaultfd_k.h>

#include "internal.h"
#include "page_alloc.h"
#include "refpage.h"

/**
 * struct refpage_page - One of the pages that show the content
 * @list: in refpage.pages
 * @page: the page; this structure holds a reference to it
 */
struct refpage_page {
	struct list_head list;
	struct page *page;
};

/**
 * struct refpage - What a file from refpage_create(2) stands for
 * @page: the page that read faults map; changes, but all the pages it has ever
 *	been stay until the file goes away
 * @content: how to make a private copy
 * @lock: protects @pages, and changes of @page
 * @pages: all pages with the content
 */
struct refpage {
	struct page *page;
	struct page_content content;
	struct mutex lock;
	struct list_head pages;
};

/*
 * A page with that many references is not mapped again. Far from an overflow,
 * since the check and the increment are not one: each CPU may add some more, and
 * each pin adds GUP_PIN_COUNTING_BIAS.
 */
static unsigned int refpage_max_refs __ro_after_init = 1 << 30;

#ifdef CONFIG_DEBUG_VM
/* 2^30 references take 8 GiB of page tables; tests want it cheaper. */
module_param_named(max_refs, refpage_max_refs, uint, 0444);
MODULE_PARM_DESC(max_refs, "References to a page before another takes over");
#endif

/* Unsigned: what pins have made negative is not to be mapped again, either. */
static unsigned int refpage_refs(struct page *page)
{
	return page_count(page);
}

/* The page is mapped as often as is safe, or its memory has gone bad. */
static bool refpage_worn(struct page *page)
{
	return unlikely(refpage_refs(page) >= refpage_max_refs ||
			PageHWPoison(page));
}

static struct page *refpage_alloc_page(void)
{
	/* Mapped by users, who may want the tags of the memory for themselves. */
	struct page *page = alloc_page(GFP_KERNEL_ACCOUNT | __GFP_SKIP_KASAN);

	if (page)
		__SetPageUptodate(page);

	return page;
}

static struct page *refpage_current(struct refpage *rp)
{
	/* Pairs with refpage_set_current(). */
	return smp_load_acquire(&rp->page);
}

static void refpage_set_current(struct refpage *rp, struct page *page)
{
	/* The content comes first. Pairs with refpage_current(). */
	smp_store_release(&rp->page, page);
}

/* Hand @page over to @rp, as the one to be mapped from now on. */
static int refpage_add_page(struct refpage *rp, struct page *page)
{
	struct refpage_page *entry;

	lockdep_assert_held(&rp->lock);

	entry = kmalloc_obj(*entry, GFP_KERNEL_ACCOUNT);
	if (!entry)
		return -ENOMEM;

	entry->page = page;
	list_add(&entry->list, &rp->pages);
	refpage_set_current(rp, page);

	return 0;
}

/* Find or make a page that can be mapped, in place of one that is worn. */
static struct page *refpage_renew(struct refpage *rp)
{
	struct page_content content = rp->content;
	struct refpage_page *entry;
	bool unreadable = false;
	struct page *page;

	guard(mutex)(&rp->lock);

	/* Somebody else was here first, or an old page has been unmapped. */
	list_for_each_entry(entry, &rp->pages, list) {
		if (PageHWPoison(entry->page) ||
		    refpage_refs(entry->page) > refpage_max_refs / 2)
			continue;
		refpage_set_current(rp, entry->page);
		return entry->page;
	}
	if (!refpage_worn(rp->page))
		return rp->page;

	page = refpage_alloc_page();
	if (!page)
		return ERR_PTR(-ENOMEM);

	if (content.kind == PAGE_CONTENT_PAGE) {
		content.page = rp->page;
		content.unreadable = &unreadable;
	}
	page_content_fill(page, &content);
	if (unreadable) {
		put_page(page);
		return ERR_PTR(-EHWPOISON);
	}

	if (refpage_add_page(rp, page)) {
		put_page(page);
		return ERR_PTR(-ENOMEM);
	}

	return page;
}

/*
 * Read faults, under RCU: maps one page, since each neighbour that is mapped as
 * well makes the first write to it dearer.
 */
static vm_fault_t refpage_map_pages(struct vm_fault *vmf, pgoff_t start_pgoff,
				    pgoff_t end_pgoff)
{
	struct vm_area_struct *vma = vmf->vma;
	struct mm_struct *mm = vma->vm_mm;
	struct page *page = refpage_current(vma->vm_private_data);
	struct folio *folio = page_folio(page);
	vm_fault_t ret = VM_FAULT_NOPAGE;

	/* Then refpage_fault() looks for another, which may sleep. */
	if (refpage_worn(page))
		return 0;

	if (pmd_none(*vmf->pmd) && vmf->prealloc_pte)
		pmd_install(mm, vmf->pmd, &vmf->prealloc_pte);

	vmf->pte = pte_offset_map_lock(mm, vmf->pmd, vmf->address, &vmf->ptl);
	if (!vmf->pte)
		return VM_FAULT_NOPAGE;

	if (!pte_none(ptep_get(vmf->pte))) {
		update_mmu_tlb(vma, vmf->address, vmf->pte);
		goto unlock;
	}

	/* The OOM reaper may have taken what was written here. */
	ret = check_stable_address_space(mm);
	if (ret)
		goto unlock;

	folio_get(folio);
	set_pte_range(vmf, folio, page, 1, vmf->address);
	add_mm_counter(mm, mm_counter_file(folio), 1);
	ret = VM_FAULT_NOPAGE;
unlock:
	pte_unmap_unlock(vmf->pte, vmf->ptl);
	vmf->pte = NULL;

	return ret;
}

/*
 * Read faults which refpage_map_pages() is not called for, or had no good page
 * for. First writes do not come here: see refpage_cow_content().
 */
static vm_fault_t refpage_fault(struct vm_fault *vmf)
{
	struct refpage *rp = vmf->vma->vm_private_data;
	struct page *page = refpage_current(rp);

	if (refpage_worn(page)) {
		page = refpage_renew(rp);
		if (page == ERR_PTR(-EHWPOISON))
			return VM_FAULT_HWPOISON;
		if (IS_ERR(page))
			return VM_FAULT_OOM;
	}

	get_page(page);
	vmf->page = page;

	return 0;
}

static void refpage_cow_content(struct vm_area_struct *vma,
				struct page_content *content)
{
	struct refpage *rp = vma->vm_private_data;

	content->kind = rp->content.kind;
	if (content->kind == PAGE_CONTENT_PAGE)
		content->page = refpage_current(rp);
	else
		content->word = rp->content.word;
}

#ifdef CONFIG_USERFAULTFD
/* Nothing is ever missing here, but writes can be tracked; not reads as well. */
static bool refpage_can_userfault(struct vm_area_struct *vma, vm_flags_t vm_flags)
{
	return !(vm_flags & (VM_UFFD_MISSING | VM_UFFD_MINOR | VM_UFFD_RWP));
}

/*
 * UFFDIO_COPY and the like get no further than this: they take the file, which
 * has no size, to end before every address. Some of them allocate first.
 */
static struct folio *refpage_uffd_alloc_folio(struct vm_area_struct *vma,
					      unsigned long addr)
{
	struct folio *folio = vma_alloc_folio(GFP_HIGHUSER_MOVABLE, 0, vma, addr);

	if (folio && mem_cgroup_charge(folio, vma->vm_mm, GFP_KERNEL)) {
		folio_put(folio);
		return NULL;
	}

	return folio;
}

static const struct vm_uffd_ops refpage_uffd_ops = {
	.can_userfault	= refpage_can_userfault,
	.alloc_folio	= refpage_uffd_alloc_folio,
};
#endif

const struct vm_operations_struct refpage_vm_ops = {
	.fault		= refpage_fault,
	.map_pages	= refpage_map_pages,
	.cow_content	= refpage_cow_content,
#ifdef CONFIG_USERFAULTFD
	.uffd_ops	= &refpage_uffd_ops,
#endif
};

static int refpage_mmap_prepare(struct vm_area_desc *desc)
{
	if (vma_desc_test_any(desc, VMA_SHARED_BIT, VMA_MAYSHARE_BIT))
		return -EINVAL;

	desc->vm_ops = &refpage_vm_ops;
	desc->private_data = desc->file->private_data;

	return 0;
}

static void refpage_free(struct refpage *rp)
{
	struct refpage_page *entry, *next;

	list_for_each_entry_safe(entry, next, &rp->pages, list) {
		put_page(entry->page);
		kfree(entry);
	}
	kfree(rp);
}

static int refpage_release(struct inode *inode, struct file *file)
{
	refpage_free(file->private_data);
	return 0;
}

static const struct file_operations refpage_fops = {
	.release	= refpage_release,
	.mmap_prepare	= refpage_mmap_prepare,
};

/* For mappings of which the kind of file decides what they can be. */
bool is_refpage_file(const struct file *file)
{
	return file && file->f_op == &refpage_fops;
}

/* Copy @size bytes from user space to the page, as often as they fit in. */
static int refpage_read_content(struct page *page, const void __user *content,
				size_t size)
{
	void *kaddr = page_address(page);
	size_t filled;

	if (copy_from_user(kaddr, content, size))
		return -EFAULT;

	for (filled = size; filled < PAGE_SIZE; filled *= 2)
		memcpy(kaddr + filled, kaddr, filled);
	flush_dcache_page(page);

	return page_tags_read(page, content, size);
}

static struct refpage *refpage_alloc(const void __user *content, size_t size)
{
	struct refpage *rp;
	struct page *page;
	int err;

	rp = kzalloc_obj(*rp, GFP_KERNEL_ACCOUNT);
	if (!rp)
		return ERR_PTR(-ENOMEM);

	mutex_init(&rp->lock);
	INIT_LIST_HEAD(&rp->pages);

	page = refpage_alloc_page();
	if (!page) {
		err = -ENOMEM;
		goto free_rp;
	}

	err = refpage_read_content(page, content, size);
	if (err)
		goto free_page;

	page_content_describe(&rp->content, page);

	scoped_guard(mutex, &rp->lock)
		err = refpage_add_page(rp, page);
	if (err)
		goto free_page;

	return rp;

free_page:
	put_page(page);
free_rp:
	refpage_free(rp);
	return ERR_PTR(err);
}

static struct file *refpage_file_create(const void __user *content, size_t size)
{
	struct refpage *rp = refpage_alloc(content, size);
	struct file *file;

	if (IS_ERR(rp))
		return ERR_CAST(rp);

	/* An inode of its own, or all such mappings meet in one i_mmap tree. */
	file = anon_inode_create_getfile("[refpage]", &refpage_fops, rp,
					 O_RDONLY, NULL);
	if (IS_ERR(file))
		refpage_free(rp);

	return file;
}

/**
 * sys_refpage_create - Make a file whose private mappings start with a pattern
 * @content: what an untouched page of a mapping shows; copied by the call, with
 *	memory tags if it has any
 * @size: size of @content, a power of two up to the size of a page; if it is
 *	smaller, a page holds it several times
 * @flags: must be 0
 *
 * Return: A new file descriptor, close-on-exec, or a negative error number.
 */
SYSCALL_DEFINE3(refpage_create, const void __user *, content, size_t, size,
		unsigned int, flags)
{
	if (flags)
		return -EINVAL;

	if (!is_power_of_2(size) || size > PAGE_SIZE)
		return -EINVAL;

	return FD_ADD(O_CLOEXEC, refpage_file_create(content, size));
}
