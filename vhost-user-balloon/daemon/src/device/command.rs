// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Commands of the host that the guest has to answer.

use balloon_protocol::{ConfigError, Features, QueueKind};

use super::report_now::NoReport;
use super::state::Device;
use crate::ring::Ring;

/// What a front end must be able to read of the configuration: the field with the command.
const FIELD_ENDS: u32 = 20;

impl Device {
    /// Why no report can be commanded, if so.
    pub fn report_obstacle(&self) -> Option<NoReport> {
        let reporting = self.queues.index(QueueKind::Reporting).and_then(|index| self.ring(index));
        let offers = Features::REPORTING | Features::REPORT_NOW;
        if !self.options.features.contains(offers) {
            Some(NoReport::NotOffered)
        } else if self.memory.regions.total() == 0 {
            Some(NoReport::NoFrontEnd)
        } else if !self.rings.iter().any(Ring::is_running) {
            Some(NoReport::NoDriver)
        } else if !self.features.contains(Features::REPORT_NOW) {
            Some(NoReport::NotAccepted)
        } else if !reporting.is_some_and(Ring::is_running) {
            Some(NoReport::NoDriver)
        } else if self.report_now.seen < FIELD_ENDS {
            Some(NoReport::ShortConfiguration(self.report_now.seen))
        } else if self.channel.is_none() {
            Some(NoReport::NoChannel)
        } else if self.inhibited {
            Some(NoReport::Suspended)
        } else if self.is_suspended() {
            Some(NoReport::Logging)
        } else {
            None
        }
    }

    /// Command the driver to report all free memory. Returns the number of the command.
    pub fn command_report(&mut self) -> Result<u32, NoReport> {
        if let Some(obstacle) = self.report_obstacle() {
            return Err(obstacle);
        }
        let number = self.report_now.begin(&mut self.config);
        self.notify_config = true;
        Ok(number)
    }

    /// The driver has written to the configuration.
    pub(crate) fn configure(&mut self, offset: u32, bytes: &[u8]) -> Result<(), ConfigError> {
        self.config.write(offset, bytes)?;
        self.update_sizes();
        let answers_zero = self.features.contains(Features::DEVICE_INIT_REPORTED);
        self.report_now.written(&self.config, answers_zero);
        Ok(())
    }
}
