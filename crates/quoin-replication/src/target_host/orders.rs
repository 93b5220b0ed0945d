//! The controller's standing orders for a volume: its options, its desired membership, a verification.
//!
//! An assignment names all of them each time. What differs from what came last becomes an event of
//! the state machine. So no order may lose its effect but by a later one: what is not repeated would
//! never come again.

use quoin_types::membership::Desired;

use crate::primary::{LiveOptions, PrimaryEvent, VerifyOrder};

/// The last orders, each of which is an event only when it changes.
pub struct Orders {
    options: LiveOptions,
    desired: Desired,
    verify: Option<VerifyOrder>,
}

impl Orders {
    /// `options`: those that the volume is opened with.
    pub fn new(options: LiveOptions) -> Self {
        Self { options, desired: Desired::default(), verify: None }
    }

    pub fn change_options(&mut self, options: LiveOptions) -> Option<PrimaryEvent> {
        (self.options != options).then(|| {
            self.options = options;
            PrimaryEvent::Options(options)
        })
    }

    pub fn desire(&mut self, desired: Desired) -> Option<PrimaryEvent> {
        (self.desired != desired).then(|| {
            self.desired = desired.clone();
            PrimaryEvent::Desired(desired)
        })
    }

    pub fn verify(&mut self, order: Option<VerifyOrder>) -> Option<PrimaryEvent> {
        (self.verify != order).then(|| {
            self.verify = order;
            PrimaryEvent::Verify(order)
        })
    }
}
