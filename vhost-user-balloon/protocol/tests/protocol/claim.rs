// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

use balloon_protocol::{Backing, Claim, Reason};

#[test]
fn a_doubt_is_never_lost() {
    let yes = Claim::Proven(Backing::Tmpfs);
    let no = Claim::Unproven(Reason::Failed);
    assert!(yes.is_proven() && !no.is_proven());
    assert_eq!(yes.and(Claim::Proven(Backing::Ext4)), yes);
    assert_eq!(yes.and(no), no);
    assert_eq!(no.and(yes), no);
    assert_eq!(no.and(Claim::Unproven(Reason::Poison)), no);
}

#[test]
fn used_length_is_all_or_nothing() {
    assert_eq!(Claim::Proven(Backing::Tmpfs).used_length(0x20_0000), 0x20_0000);
    for reason in Reason::ALL {
        assert_eq!(Claim::Unproven(reason).used_length(0x20_0000), 0);
    }
}
