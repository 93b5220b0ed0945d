//! The request for a volume.

use std::collections::BTreeMap;

use quoin_api::control::{self as api, VolumeSpec};
use quoin_api::volume::{Spread, VolumeOptions};
use quoin_encryption::Encryption;
use serde::{Deserialize, Serialize};

/// The request for a volume, complete: every default is filled in.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Spec {
    pub name: String,
    pub replicas: u8,
    pub consistency_factor: u8,
    #[serde(flatten)]
    pub options: VolumeOptions,
    pub allow_loss_on_single_failure: bool,
    pub parameters: BTreeMap<String, String>,
    /// Any of these; empty: anywhere.
    pub accessible_topology: Vec<BTreeMap<String, String>>,
    /// `None`: the volume is not encrypted. Holds wrapped keys alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption: Option<Encryption>,
    /// CSI's mutable parameters, as the volume was made with them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub mutable_parameters: BTreeMap<String, String>,
    /// Names of it by its orchestrator: `pvc/name` and the like. For people; a repeated creation may say otherwise.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub claim: BTreeMap<String, String>,
    /// The options that it was made with, where they were changed since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_options: Option<Box<VolumeOptions>>,
}

impl Spec {
    /// A volume with every option at its default.
    pub fn plain(name: &str, replicas: u8, consistency_factor: u8) -> Self {
        let options = VolumeOptions::complete(&VolumeSpec::default(), Spread::Pool);
        Self {
            name: name.to_owned(),
            replicas,
            consistency_factor,
            options: options.expect("defaults keep their rules"),
            allow_loss_on_single_failure: false,
            parameters: BTreeMap::new(),
            accessible_topology: Vec::new(),
            encryption: None,
            mutable_parameters: BTreeMap::new(),
            claim: BTreeMap::new(),
            created_options: None,
        }
    }

    /// Replaces the options. A repeated creation is compared with those that it asked for.
    pub fn change_options(&mut self, options: VolumeOptions) {
        let before = std::mem::replace(&mut self.options, options);
        if before != self.options {
            self.created_options.get_or_insert_with(|| Box::new(before));
        }
    }

    /// Its topologies as messages have them.
    pub fn topologies(&self) -> Vec<api::Topology> {
        let segments = |one: &BTreeMap<String, String>| one.clone().into_iter().collect();
        let message = |one| api::Topology { segments: segments(one) };
        self.accessible_topology.iter().map(message).collect()
    }

    /// As it was made.
    pub fn as_created(&self) -> Self {
        let created = self.created_options.as_deref().unwrap_or(&self.options);
        Self { options: created.clone(), created_options: None, ..self.clone() }
    }
}

impl From<&Spec> for VolumeSpec {
    fn from(spec: &Spec) -> Self {
        let mut message = VolumeSpec {
            name: spec.name.clone(),
            size_bytes: 0,
            replicas: spec.replicas.into(),
            consistency_factor: spec.consistency_factor.into(),
            allow_loss_on_single_failure: spec.allow_loss_on_single_failure,
            parameters: spec.parameters.clone().into_iter().collect(),
            mutable_parameters: spec.mutable_parameters.clone().into_iter().collect(),
            accessible_topology: spec.topologies(),
            claim: spec.claim.clone().into_iter().collect(),
            encryption: spec.encryption.as_ref().map(api::Encryption::from),
            ..VolumeSpec::default()
        };
        spec.options.write(&mut message);
        message
    }
}
