// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a guest or a front end can cause must not flood the log.

use std::time::{Duration, Instant};

/// Lets a burst of messages pass and then one a second; counts the others.
#[derive(Debug)]
pub struct Limiter {
    left: u32,
    refilled: Instant,
    dropped: u64,
}

const BURST: u32 = 10;

impl Default for Limiter {
    fn default() -> Self {
        Self { left: BURST, refilled: Instant::now(), dropped: 0 }
    }
}

impl Limiter {
    /// Whether a message may be written now, and how many were not since the last one.
    pub fn allow(&mut self) -> Option<u64> {
        self.allow_at(Instant::now())
    }

    fn allow_at(&mut self, now: Instant) -> Option<u64> {
        let seconds = now.saturating_duration_since(self.refilled).as_secs();
        if seconds > 0 {
            let more = u32::try_from(seconds).unwrap_or(BURST);
            self.left = self.left.saturating_add(more).min(BURST);
            self.refilled = self.refilled.checked_add(Duration::from_secs(seconds)).unwrap_or(now);
        }
        if let Some(left) = self.left.checked_sub(1) {
            self.left = left;
            Some(std::mem::take(&mut self.dropped))
        } else {
            self.dropped = self.dropped.saturating_add(1);
            None
        }
    }
}

/// A warning that a guest or a front end caused; with `info:`, a message.
#[macro_export]
macro_rules! limited {
    (info: $limiter:expr, $($message:tt)+) => {
        if let Some(dropped) = $limiter.allow() {
            tracing::info!(dropped, $($message)+);
        }
    };
    ($limiter:expr, $($message:tt)+) => {
        if let Some(dropped) = $limiter.allow() {
            tracing::warn!(dropped, $($message)+);
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_and_then_one_a_second() {
        let mut limiter = Limiter::default();
        let start = limiter.refilled;
        let passed = (0..1000).filter(|_| limiter.allow_at(start).is_some()).count();
        assert_eq!(passed, 10);
        assert_eq!(limiter.allow_at(start + Duration::from_millis(1500)), Some(990));
        assert_eq!(limiter.allow_at(start + Duration::from_millis(1900)), None);
        assert_eq!(limiter.allow_at(start + Duration::from_millis(2000)), Some(1));
    }

    #[test]
    fn by_the_clock() {
        let mut limiter = Limiter::default();
        let passed = (0..1000).filter(|_| limiter.allow() == Some(0)).count();
        assert!((10..100).contains(&passed), "{passed}");
    }
}
