// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Counters, for Prometheus and for `status`.

use std::fmt::Write;
use std::time::Duration;

use balloon_protocol::{Backing, QueueKind, Reason, Statistics};
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, LabelSetEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

/// A label whose values are known when the program is compiled: a guest cannot make more of them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Label(&'static str, &'static str);

impl EncodeLabelSet for Label {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> Result<(), std::fmt::Error> {
        prometheus_client::encoding::EncodeLabel::encode(&(self.0, self.1), encoder.encode_label())
    }
}

/// Everything that is counted.
pub struct Metrics {
    registry: Registry,
    received: Family<Label, Counter>,
    discarded: Family<Label, Counter>,
    proven: Family<Label, Counter>,
    skipped: Family<Label, Counter>,
    unproven: Family<Label, Counter>,
    requests: Family<Label, Counter>,
    malformed: Counter,
    refused: Counter,
    seconds: Histogram,
    target: Gauge,
    actual: Gauge,
    guest: Family<Label, Gauge>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("vhost_user_balloon");
        let mut family = |name: &str, help: &str, bytes: bool| {
            let made = Family::<Label, Counter>::default();
            if bytes {
                registry.register_with_unit(name, help, Unit::Bytes, made.clone());
            } else {
                registry.register(name, help, made.clone());
            }
            made
        };
        let received = family("received", "Memory the driver has handed over, by queue", true);
        let discarded = family("discarded", "Memory given back to the host, by queue", true);
        let proven = family("proven_zero", "Memory the driver was told reads as zero, by backing", true);
        let skipped = family("skipped", "Memory handed over and not given back, by reason", true);
        let unproven = family("unproven", "Memory given back but not said to read as zero, by reason", true);
        let requests = family("requests", "Buffers of the driver that were used, by queue", false);
        let malformed = Counter::default();
        registry.register("malformed", "Buffers and rings that make no sense", malformed.clone());
        let refused = Counter::default();
        registry.register("refused", "Requests of the front end that were refused", refused.clone());
        let seconds = Histogram::new((0..10).map(|n| 4e-6 * 4_f64.powi(n)));
        registry.register_with_unit("discard", "Time of one discard", Unit::Seconds, seconds.clone());
        let target = Gauge::default();
        registry.register_with_unit("target", "Size the balloon shall have", Unit::Bytes, target.clone());
        let actual = Gauge::default();
        registry.register_with_unit("actual", "Size the driver says it has", Unit::Bytes, actual.clone());
        let guest = Family::<Label, Gauge>::default();
        registry.register("guest", "What the driver tells of its memory (bytes or events)", guest.clone());

        // Series that exist from the start can be told from ones that are missing.
        for kind in [QueueKind::Inflate, QueueKind::Reporting] {
            let label = Label("queue", kind.label());
            let _ = received.get_or_create(&label);
            let _ = discarded.get_or_create(&label);
        }
        for reason in Reason::ALL {
            let _ = skipped.get_or_create(&Label("reason", reason.label()));
            let _ = unproven.get_or_create(&Label("reason", reason.label()));
        }
        Self {
            registry,
            received,
            discarded,
            proven,
            skipped,
            unproven,
            requests,
            malformed,
            refused,
            seconds,
            target,
            actual,
            guest,
        }
    }
}

fn gauge(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

impl Metrics {
    /// A buffer of the driver was used.
    pub fn request(&self, kind: QueueKind) {
        self.requests.get_or_create(&Label("queue", kind.label())).inc();
    }

    /// Memory came in, and this much of it went back to the host.
    pub fn memory(&self, kind: QueueKind, received: u64, discarded: u64) {
        let label = Label("queue", kind.label());
        self.received.get_or_create(&label).inc_by(received);
        self.discarded.get_or_create(&label).inc_by(discarded);
    }

    /// The driver was told that so many bytes read as zero.
    pub fn proven(&self, backing: Backing, bytes: u64) {
        self.proven.get_or_create(&Label("backing", backing.label())).inc_by(bytes);
    }

    /// So many bytes were not given back.
    pub fn skipped(&self, reason: Reason, bytes: u64) {
        self.skipped.get_or_create(&Label("reason", reason.label())).inc_by(bytes);
    }

    /// So many bytes were given back and nothing is said of what they read as.
    pub fn unproven(&self, reason: Reason, bytes: u64) {
        self.unproven.get_or_create(&Label("reason", reason.label())).inc_by(bytes);
    }

    /// A buffer or a ring made no sense.
    pub fn malformed(&self) {
        self.malformed.inc();
    }

    /// A request of the front end was refused.
    pub fn refused(&self) {
        self.refused.inc();
    }

    /// A discard took this long.
    pub fn took(&self, time: Duration) {
        self.seconds.observe(time.as_secs_f64());
    }

    /// The balloon's sizes, in bytes.
    pub fn sizes(&self, target: u64, actual: u64) {
        self.target.set(gauge(target));
        self.actual.set(gauge(actual));
    }

    /// What the driver told.
    pub fn statistics(&self, told: &Statistics) {
        for (name, _, value) in told.entries() {
            self.guest.get_or_create(&Label("stat", name)).set(gauge(value));
        }
    }

    /// The sums `status` shows.
    pub fn totals(&self) -> Totals {
        let of =
            |family: &Family<Label, Counter>, key, labels: &[&'static str]| -> Vec<(&'static str, u64)> {
                labels.iter().map(|l| (*l, family.get_or_create(&Label(key, l)).get())).collect()
            };
        let sum = |list: Vec<(&'static str, u64)>| list.iter().map(|(_, n)| n).sum();
        let reasons = Reason::ALL.map(Reason::label);
        let queues = [QueueKind::Inflate.label(), QueueKind::Reporting.label()];
        let some = |list: Vec<(&'static str, u64)>| list.into_iter().filter(|(_, n)| *n > 0).collect();
        Totals {
            inflated: self.received.get_or_create(&Label("queue", QueueKind::Inflate.label())).get(),
            reported: self.received.get_or_create(&Label("queue", QueueKind::Reporting.label())).get(),
            discarded: sum(of(&self.discarded, "queue", &queues)),
            proven: [Backing::Tmpfs, Backing::Hugetlbfs, Backing::Ext4, Backing::Xfs]
                .iter()
                .map(|b| self.proven.get_or_create(&Label("backing", b.label())).get())
                .sum(),
            skipped: some(of(&self.skipped, "reason", &reasons)),
            unproven: some(of(&self.unproven, "reason", &reasons)),
            malformed: self.malformed.get(),
            refused: self.refused.get(),
        }
    }

    /// All of it in the text format of OpenMetrics.
    pub fn text(&self) -> String {
        let mut text = String::new();
        if let Err(error) = encode(&mut text, &self.registry) {
            text.clear();
            let _ = write!(text, "# cannot be encoded: {error}\n# EOF\n");
        }
        text
    }
}

/// Sums over all labels, in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Totals {
    /// Handed over by inflating.
    pub inflated: u64,
    /// Handed over as free.
    pub reported: u64,
    /// Given back to the host.
    pub discarded: u64,
    /// Said to read as zero.
    pub proven: u64,
    /// Not given back, by reason.
    pub skipped: Vec<(&'static str, u64)>,
    /// Given back but not said to be zero, by reason.
    pub unproven: Vec<(&'static str, u64)>,
    /// Buffers and rings that make no sense.
    pub malformed: u64,
    /// Requests that were refused.
    pub refused: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_scraper_sees() {
        let metrics = Metrics::default();
        metrics.memory(QueueKind::Reporting, 8192, 4096);
        metrics.proven(Backing::Tmpfs, 4096);
        metrics.skipped(Reason::PartOfHostPage, 4096);
        metrics.took(Duration::from_micros(50));
        metrics.sizes(1 << 30, 5);
        metrics.statistics(&Statistics { free_memory: Some(77), ..Statistics::default() });
        let text = metrics.text();
        for line in [
            "vhost_user_balloon_received_bytes_total{queue=\"reporting\"} 8192",
            "vhost_user_balloon_discarded_bytes_total{queue=\"reporting\"} 4096",
            "vhost_user_balloon_proven_zero_bytes_total{backing=\"tmpfs\"} 4096",
            "vhost_user_balloon_skipped_bytes_total{reason=\"part_of_host_page\"} 4096",
            "vhost_user_balloon_skipped_bytes_total{reason=\"poison\"} 0",
            "vhost_user_balloon_discard_seconds_count 1",
            "vhost_user_balloon_target_bytes 1073741824",
            "vhost_user_balloon_actual_bytes 5",
            "vhost_user_balloon_guest{stat=\"free_memory\"} 77",
            "# EOF",
        ] {
            assert!(text.lines().any(|l| l == line), "no line {line:?} in\n{text}");
        }
        let totals = metrics.totals();
        assert_eq!((totals.reported, totals.discarded, totals.proven), (8192, 4096, 4096));
        assert_eq!(totals.skipped, [("part_of_host_page", 4096)]);
    }
}
