//! Options about where a controller's records lie.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use quoin_api::volume::parse_time;
use quoin_control::store::{
    Engine, EtcdOptions, KubernetesStoreOptions, LeaseTimes, SharedOptions,
};
use quoin_control::{ApiError, ApiOptions, Records};

use super::host_name;

#[derive(Args, Clone, Debug)]
pub struct RecordsOptions {
    /// Where the records lie: `embedded`, in the directory of the one controller; `etcd`, or `kubernetes` in the
    /// cluster's own API, for several controllers, of which one rules and the next one takes its place within
    /// seconds.
    #[arg(long, value_enum, value_name = "STORE", default_value = "embedded", env = "QUOIN_STORE")]
    store: StoreKind,
    /// Addresses of etcd's members, separated by commas.
    #[arg(
        long,
        value_name = "URL,…",
        value_delimiter = ',',
        env = "QUOIN_ETCD_ENDPOINTS",
        required_if_eq("store", "etcd")
    )]
    etcd_endpoints: Vec<String>,
    /// Begins all keys of this cluster: one etcd may serve several.
    #[arg(long, value_name = "PREFIX", default_value = "/quoin", env = "QUOIN_ETCD_PREFIX")]
    etcd_prefix: String,
    /// Certificate of the authority that signed etcd's own (PEM), for https:// addresses.
    #[arg(long, value_name = "FILE", env = "QUOIN_ETCD_CA")]
    etcd_ca: Option<PathBuf>,
    /// Certificate by which etcd knows this controller (PEM).
    #[arg(long, value_name = "FILE", env = "QUOIN_ETCD_CERTIFICATE", requires = "etcd_key")]
    etcd_certificate: Option<PathBuf>,
    /// Private key of that certificate (PEM).
    #[arg(long, value_name = "FILE", env = "QUOIN_ETCD_KEY", requires = "etcd_certificate")]
    etcd_key: Option<PathBuf>,
    /// Begins the name of each object in Kubernetes: one namespace may serve several clusters.
    #[arg(long, value_name = "NAME", default_value = "quoin", env = "QUOIN_KUBERNETES_CLUSTER")]
    kubernetes_cluster: String,
    /// Address of Kubernetes' API, for a controller outside a pod [default: that of the pod, with the
    /// namespace, the token and the authority of its service account].
    #[arg(long, value_name = "URL", env = "QUOIN_KUBERNETES_API",
          requires_all = ["kubernetes_namespace", "kubernetes_token"])]
    kubernetes_api: Option<String>,
    /// Namespace of the records at that address.
    #[arg(long, value_name = "NAMESPACE", requires = "kubernetes_api")]
    kubernetes_namespace: Option<String>,
    /// Token of the caller there: a file, which is read at each call.
    #[arg(long, value_name = "FILE", requires = "kubernetes_api")]
    kubernetes_token: Option<PathBuf>,
    /// Certificates of the authorities that may have signed that API's own (PEM).
    #[arg(
        long,
        value_name = "FILE",
        requires = "kubernetes_api",
        default_value = "/etc/ssl/certs/ca-certificates.crt"
    )]
    kubernetes_ca: PathBuf,
    /// Lease by which one of several controllers rules: it lasts so long, its holder orders nothing after so
    /// long without a renewal, and renews it so often.
    #[arg(long, value_name = "LASTS/RENEW/RETRY", default_value = "15s/10s/2s", env = "QUOIN_LEASE",
          value_parser = parse_lease)]
    lease: LeaseTimes,
}

/// A store of records.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum StoreKind {
    Embedded,
    Etcd,
    Kubernetes,
}

impl RecordsOptions {
    /// # Errors
    /// Nothing says where Kubernetes' API is.
    pub fn records(self) -> Result<Records, ApiError> {
        let kind = self.store;
        self.records_in(kind)
    }

    /// The records in a store of another kind than that of `--store`.
    ///
    /// # Errors
    /// Nothing says where Kubernetes' API is.
    pub fn records_in(self, kind: StoreKind) -> Result<Records, ApiError> {
        let engine = match kind {
            StoreKind::Embedded => return Ok(Records::Embedded),
            StoreKind::Etcd => Engine::Etcd(EtcdOptions {
                endpoints: self.etcd_endpoints,
                prefix: self.etcd_prefix,
                ca: self.etcd_ca,
                certificate: self.etcd_certificate,
                key: self.etcd_key,
            }),
            StoreKind::Kubernetes => {
                let api = match self.kubernetes_api {
                    None => ApiOptions::of_pod()?,
                    Some(server) => ApiOptions {
                        server,
                        ca: self.kubernetes_ca,
                        token: self.kubernetes_token.unwrap_or_default(),
                        namespace: self.kubernetes_namespace.unwrap_or_default(),
                    },
                };
                Engine::Kubernetes(KubernetesStoreOptions { cluster: self.kubernetes_cluster, api })
            }
        };
        let (times, controller) = (self.lease, host_name());
        Ok(Records::Shared(SharedOptions { engine, times, controller }))
    }
}

fn parse_lease(text: &str) -> Result<LeaseTimes, String> {
    let wrong = || "write LASTS/RENEW/RETRY, as in 15s/10s/2s or 4s/3s/500ms".to_owned();
    let time = |text: &str| match text.strip_suffix("ms") {
        Some(number) => number.parse().ok().map(std::time::Duration::from_millis),
        None => parse_time(text),
    };
    let times: Option<Vec<_>> = text.split('/').map(time).collect();
    let [lasts, renew_within, retry] = times.ok_or_else(wrong)?[..] else { return Err(wrong()) };
    let times = LeaseTimes { lasts, renew_within, retry };
    times.check().map_err(|error| error.to_string())?;
    Ok(times)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_three_times_that_fit_each_other() {
        let times = parse_lease("4s/3s/500ms").unwrap();
        assert_eq!(times.lasts.as_secs(), 4);
        assert_eq!((times.renew_within.as_secs(), times.retry.as_millis()), (3, 500));
        for wrong in
            ["", "15s", "15s/10s", "15s/10s/2s/1s", "10s/10s/2s", "15s/10s/6s", "1s/900ms/100ms"]
        {
            let why = parse_lease(wrong).unwrap_err();
            assert!(why.contains("LASTS/RENEW/RETRY"), "{wrong}: {why}");
        }
    }
}
