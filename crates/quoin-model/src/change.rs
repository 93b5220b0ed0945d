//! Changes of membership.

use crate::bounds::Model;
use crate::explore::Steps;
use crate::state::State;

impl Model {
    pub(crate) fn change_steps(&self, _s: &State, _steps: &mut Steps) {}
}
