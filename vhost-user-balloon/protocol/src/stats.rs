// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The driver's statistics of the guest's memory.

/// 64 entries: virtio has 16 tags, and a driver sends each of them once.
pub const MAX_STATS_BYTES: usize = 64 * ENTRY;

const ENTRY: usize = 10;

macro_rules! statistics {
    ($($(#[$doc:meta])* $tag:literal $name:ident;)*) => {
        /// Statistics of the guest; what it did not send is `None`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
        #[non_exhaustive]
        pub struct Statistics {
            $($(#[$doc])* pub $name: Option<u64>,)*
        }

        impl Statistics {
            fn set(&mut self, tag: u16, value: u64) {
                match tag {
                    $($tag => self.$name = Some(value),)*
                    _ => {}
                }
            }

            /// Name and value of everything that was sent.
            pub fn entries(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*]
                    .into_iter()
                    .filter_map(|(name, value)| Some((name, value?)))
            }
        }
    };
}

statistics! {
    /// Memory swapped in.
    0 swap_in;
    /// Memory swapped out.
    1 swap_out;
    /// Major page faults.
    2 major_faults;
    /// Minor page faults.
    3 minor_faults;
    /// Memory that is used for nothing at all.
    4 free_memory;
    /// Memory that there is.
    5 total_memory;
    /// Memory that could be had without swapping.
    6 available_memory;
    /// Memory in disk caches.
    7 disk_caches;
    /// Huge pages that could be allocated.
    8 hugetlb_allocations;
    /// Huge pages that could not.
    9 hugetlb_failures;
    /// How often the OOM killer ran.
    10 oom_kills;
    /// How often an allocation had to wait for reclaim.
    11 allocation_stalls;
    /// Memory scanned in the background.
    12 async_scans;
    /// Memory scanned while an allocation waited.
    13 direct_scans;
    /// Memory reclaimed in the background.
    14 async_reclaims;
    /// Memory reclaimed while an allocation waited.
    15 direct_reclaims;
}

impl Statistics {
    /// Read what the driver sent: tags of 16 and values of 64 bits, little-endian, not padded.
    ///
    /// Tags that are not known and an incomplete last entry are ignored; of a tag that comes twice the
    /// last value counts.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Self {
        let mut found = Self::default();
        for entry in bytes.chunks_exact(ENTRY) {
            let (tag, value) = entry.split_at(2);
            if let (Ok(tag), Ok(value)) = (tag.try_into(), value.try_into()) {
                found.set(u16::from_le_bytes(tag), u64::from_le_bytes(value));
            }
        }
        found
    }
}
