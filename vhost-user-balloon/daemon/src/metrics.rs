// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Counters, for Prometheus and for `status`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use balloon_discard::{Backing, Reason};
use balloon_protocol::{QueueKind, Statistics};
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

/// A counter for each value of a label. All of them exist from the start, so no series is missing.
pub struct ByLabel {
    key: &'static str,
    values: Vec<&'static str>,
    family: Family<Label, Counter>,
}

impl ByLabel {
    pub fn add(&self, value: &'static str, by: u64) {
        self.family.get_or_create(&Label(self.key, value)).inc_by(by);
    }

    pub fn get(&self, value: &'static str) -> u64 {
        self.family.get_or_create(&Label(self.key, value)).get()
    }

    pub fn sum(&self) -> u64 {
        self.values.iter().map(|value| self.get(value)).sum()
    }

    pub fn non_zero(&self) -> BTreeMap<&'static str, u64> {
        self.values.iter().map(|value| (*value, self.get(value))).filter(|(_, n)| *n > 0).collect()
    }
}

pub struct Metrics {
    registry: Registry,
    pub received: ByLabel,
    pub discarded: ByLabel,
    pub proven: ByLabel,
    pub skipped: ByLabel,
    pub unproven: ByLabel,
    pub requests: ByLabel,
    pub malformed: Counter,
    pub refused: Counter,
    seconds: Histogram,
    target: Gauge,
    actual: Gauge,
    guest: Family<Label, Gauge>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("vhost_user_balloon");
        let (malformed, refused) = (Counter::default(), Counter::default());
        registry.register("malformed", "Malformed buffers and rings", malformed.clone());
        registry.register("refused", "Requests of the front end that were refused", refused.clone());
        let seconds = Histogram::new((0..10).map(|n| 4e-6 * 4_f64.powi(n)));
        registry.register_with_unit("discard", "Time of one discard", Unit::Seconds, seconds.clone());
        let (target, actual) = (Gauge::default(), Gauge::default());
        registry.register_with_unit("target", "Target size of the balloon", Unit::Bytes, target.clone());
        let help = "Size of the balloon, from the driver";
        registry.register_with_unit("actual", help, Unit::Bytes, actual.clone());
        let guest = Family::<Label, Gauge>::default();
        registry.register("guest", "Statistics of the driver (bytes or events)", guest.clone());
        let mut by = |key, values: &[&'static str], name: &str, help: &str| {
            let made = ByLabel { key, values: values.to_vec(), family: Family::default() };
            match name {
                "requests" => registry.register(name, help, made.family.clone()),
                _ => registry.register_with_unit(name, help, Unit::Bytes, made.family.clone()),
            }
            values.iter().for_each(|value| made.add(value, 0));
            made
        };
        let taken = [QueueKind::Inflate, QueueKind::Reporting].map(QueueKind::label);
        let queues: Vec<_> = QueueKind::ALL.iter().map(|queue| queue.label()).collect();
        let backings: Vec<_> = Backing::ALL.iter().map(|backing| backing.label()).collect();
        let reasons: Vec<_> = Reason::ALL.iter().map(|reason| reason.label()).collect();
        Self {
            received: by("queue", &taken, "received", "Memory the driver has handed over, by queue"),
            discarded: by("queue", &taken, "discarded", "Memory discarded, held or not, by queue"),
            proven: by("backing", &backings, "proven_zero", "Memory returned as zero, by backing"),
            skipped: by("reason", &reasons, "skipped", "Memory handed over and not given back, by reason"),
            unproven: by("reason", &reasons, "unproven", "Memory given back, not claimed zero, by reason"),
            requests: by("queue", &queues, "requests", "Buffers of the driver that were used, by queue"),
            malformed,
            refused,
            seconds,
            target,
            actual,
            guest,
            registry,
        }
    }
}

fn gauge(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

impl Metrics {
    pub fn took(&self, time: Duration) {
        self.seconds.observe(time.as_secs_f64());
    }

    pub fn sizes(&self, target: u64, actual: u64) {
        self.target.set(gauge(target));
        self.actual.set(gauge(actual));
    }

    pub fn statistics(&self, statistics: &Statistics) {
        for (name, value) in statistics.entries() {
            self.guest.get_or_create(&Label("stat", name)).set(gauge(value));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_scraper_sees() {
        let metrics = Metrics::default();
        metrics.received.add("reporting", 8192);
        metrics.discarded.add("reporting", 4096);
        metrics.proven.add("tmpfs", 4096);
        metrics.skipped.add("part_of_host_page", 4096);
        metrics.took(Duration::from_micros(50));
        metrics.sizes(1 << 30, 5);
        let mut statistics = Statistics::default();
        statistics.free_memory = Some(77);
        metrics.statistics(&statistics);
        let text = metrics.text();
        for line in [
            "vhost_user_balloon_received_bytes_total{queue=\"reporting\"} 8192",
            "vhost_user_balloon_discarded_bytes_total{queue=\"reporting\"} 4096",
            "vhost_user_balloon_proven_zero_bytes_total{backing=\"tmpfs\"} 4096",
            "vhost_user_balloon_skipped_bytes_total{reason=\"part_of_host_page\"} 4096",
            "vhost_user_balloon_skipped_bytes_total{reason=\"poison\"} 0",
            "vhost_user_balloon_proven_zero_bytes_total{backing=\"xfs\"} 0",
            "vhost_user_balloon_discard_seconds_count 1",
            "vhost_user_balloon_target_bytes 1073741824",
            "vhost_user_balloon_actual_bytes 5",
            "vhost_user_balloon_guest{stat=\"free_memory\"} 77",
            "# EOF",
        ] {
            assert!(text.lines().any(|l| l == line), "no line {line:?} in\n{text}");
        }
        assert_eq!((metrics.discarded.sum(), metrics.skipped.sum()), (4096, 4096));
        assert_eq!(metrics.skipped.non_zero(), BTreeMap::from([("part_of_host_page", 4096)]));
    }
}
