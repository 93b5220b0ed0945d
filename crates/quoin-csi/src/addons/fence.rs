//! Fences of networks: nodes in a block of addresses, and clients that come from it, write no volume any more.
//!
//! The controller's calls are of the control plane, which answers once a fence holds. The node's call
//! names the addresses of that node alone, by which it can be fenced later.

use std::collections::BTreeSet;
use std::net::IpAddr;

use quoin_api::control as api;
use quoin_api::csi_addons::fence::fence_controller_server::FenceController;
use quoin_api::csi_addons::fence::{
    Cidr, ClientDetails, FenceClusterNetworkRequest, FenceClusterNetworkResponse,
    GetFenceClientsRequest, GetFenceClientsResponse, ListClusterFenceRequest,
    ListClusterFenceResponse, UnfenceClusterNetworkRequest, UnfenceClusterNetworkResponse,
};
use tonic::{Request, Response, Status};

use crate::refusal::{invalid, missing, no_address, no_answer_in_time};
use crate::{Plugin, addons};

/// Most blocks of one call.
const BLOCKS_MAX: usize = 1024;
/// Longest text of a block.
const BLOCK_BYTES_MAX: usize = 48;

/// Serves fences: three calls in the modes that have the controller, and one in those with the node.
pub(crate) struct FenceService(pub Plugin);

/// Returns the blocks of a request, which the control plane reads.
fn blocks(cidrs: Vec<Cidr>) -> Result<Vec<String>, Status> {
    if cidrs.is_empty() {
        return Err(missing("cidrs"));
    }
    if cidrs.len() > BLOCKS_MAX {
        return Err(invalid("cidrs", format!("has more than {BLOCKS_MAX} blocks")));
    }
    if cidrs.iter().any(|cidr| cidr.cidr.len() > BLOCK_BYTES_MAX) {
        return Err(invalid("cidrs", "has a text that is longer than any block"));
    }
    Ok(cidrs.into_iter().map(|cidr| cidr.cidr).collect())
}

fn cidrs(blocks: impl IntoIterator<Item = String>) -> Vec<Cidr> {
    blocks.into_iter().map(|cidr| Cidr { cidr }).collect()
}

fn block_of(address: IpAddr) -> String {
    format!("{address}/{}", if address.is_ipv4() { 32 } else { 128 })
}

/// Returns the addresses of a node, each as a block: those that it reported and those that its host has. An
/// address that another node has too (a bridge of containers has the same on many hosts) names neither,
/// unless the node reaches the controller by it.
fn addresses(name: &str, here: &[String], nodes: &[api::Node]) -> Vec<String> {
    let read = |text: &String| text.parse::<IpAddr>().ok();
    let with_port = |text: &str| text.parse().map(|address: std::net::SocketAddr| address.ip());
    let own = nodes.iter().find(|node| node.name == name);
    let by = own.and_then(|node| node.address.parse().or_else(|_| with_port(&node.address)).ok());
    let others = nodes.iter().filter(|node| node.name != name);
    let others: BTreeSet<IpAddr> =
        others.flat_map(|node| node.host_addresses.iter().filter_map(read)).collect();
    let reported = own.iter().flat_map(|node| node.host_addresses.iter()).filter_map(read);
    let all = reported.chain(here.iter().filter_map(read)).filter(|ip| !others.contains(ip));
    let named: BTreeSet<IpAddr> = all.chain(by).filter(|ip| !ip.is_loopback()).collect();
    named.into_iter().map(block_of).collect()
}

#[tonic::async_trait]
impl FenceController for FenceService {
    async fn fence_cluster_network(
        &self,
        request: Request<FenceClusterNetworkRequest>,
    ) -> Result<Response<FenceClusterNetworkResponse>, Status> {
        let backend = self.0.served_by_controller("FenceClusterNetwork")?;
        let mut request = request.into_inner();
        let _secrets = self.0.admit("FenceClusterNetwork", &mut request.secrets)?;
        let blocks = blocks(request.cidrs)?;
        addons::run("FenceClusterNetwork", async move {
            backend.add_fences(blocks).await?;
            Ok(Response::new(FenceClusterNetworkResponse {}))
        })
        .await
    }

    async fn unfence_cluster_network(
        &self,
        request: Request<UnfenceClusterNetworkRequest>,
    ) -> Result<Response<UnfenceClusterNetworkResponse>, Status> {
        let backend = self.0.served_by_controller("UnfenceClusterNetwork")?;
        let mut request = request.into_inner();
        let _secrets = self.0.admit("UnfenceClusterNetwork", &mut request.secrets)?;
        let blocks = blocks(request.cidrs)?;
        addons::run("UnfenceClusterNetwork", async move {
            backend.remove_fences(blocks).await?;
            Ok(Response::new(UnfenceClusterNetworkResponse {}))
        })
        .await
    }

    async fn list_cluster_fence(
        &self,
        request: Request<ListClusterFenceRequest>,
    ) -> Result<Response<ListClusterFenceResponse>, Status> {
        let backend = self.0.served_by_controller("ListClusterFence")?;
        let mut request = request.into_inner();
        let _secrets = self.0.admit("ListClusterFence", &mut request.secrets)?;
        addons::run("ListClusterFence", async move {
            let fences = backend.fences().await?;
            let cidrs = cidrs(fences.into_iter().map(|fence| fence.block));
            Ok(Response::new(ListClusterFenceResponse { cidrs }))
        })
        .await
    }

    async fn get_fence_clients(
        &self,
        request: Request<GetFenceClientsRequest>,
    ) -> Result<Response<GetFenceClientsResponse>, Status> {
        let (backend, node) = self.0.served_by_node("GetFenceClients")?;
        let mut request = request.into_inner();
        let _secrets = self.0.admit("GetFenceClients", &mut request.secrets)?;
        let id = node.name.clone();
        addons::run("GetFenceClients", async move {
            // Without the others' addresses it is not known which name this node alone.
            let nodes = tokio::time::timeout(addons::CONTROLLER_MAX, backend.nodes()).await;
            let nodes = nodes.unwrap_or_else(|_| Err(no_answer_in_time(addons::CONTROLLER_MAX)))?;
            let blocks = addresses(&id, &quoin_node::host_addresses(), &nodes);
            if blocks.is_empty() {
                return Err(no_address(&id));
            }
            let client = ClientDetails { id, addresses: cidrs(blocks) };
            Ok(Response::new(GetFenceClientsResponse { clients: vec![client] }))
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, address: &str, host: &[&str]) -> api::Node {
        api::Node {
            name: name.to_owned(),
            address: address.to_owned(),
            host_addresses: host.iter().map(|address| (*address).to_owned()).collect(),
            ..api::Node::default()
        }
    }

    #[test]
    fn blocks_are_taken_up_to_their_number_and_their_length() {
        let of = |count: usize, bytes: usize| blocks(cidrs(vec!["x".repeat(bytes); count]));
        for (count, bytes, is_taken) in [
            (0, 1, false),
            (1, 1, true),
            (1023, 1, true),
            (1024, 1, true),
            (1025, 1, false),
            (1, 47, true),
            (1, 48, true),
            (1, 49, false),
        ] {
            let read = of(count, bytes);
            assert_eq!(read.is_ok(), is_taken, "{count} of {bytes} bytes");
            if let Err(status) = &read {
                assert_eq!(status.code(), tonic::Code::InvalidArgument);
            }
            assert!(read.is_err() || read.unwrap().len() == count);
        }
        // The last one counts.
        let mut long = vec!["x".to_owned(); 3];
        long.push("x".repeat(49));
        assert!(blocks(cidrs(long)).is_err());
        let shown = |address: &str| block_of(address.parse().unwrap());
        assert_eq!(shown("192.0.2.1"), "192.0.2.1/32");
        assert_eq!(shown("fd00::1"), "fd00::1/128");
    }

    #[test]
    fn a_node_is_named_by_its_own_addresses_and_not_by_those_that_many_hosts_have() {
        let here = ["192.0.2.1".to_owned(), "172.17.0.1".to_owned(), "fd00::1".to_owned()];
        let named = |nodes: &[api::Node]| addresses("h1", &here, nodes);
        let other = node("h2", "192.0.2.2:7402", &["192.0.2.2", "172.17.0.1"]);
        let own = node("h1", "192.0.2.1:7402", &["192.0.2.1", "198.51.100.1", "172.17.0.1"]);
        let expected = ["192.0.2.1/32", "198.51.100.1/32", "fd00::1/128"];
        assert_eq!(named(&[own.clone(), other]), expected);
        // All nodes of one host: the address by which the controller is reached names them.
        let beside = node("h2", "192.0.2.1", &["192.0.2.1", "172.17.0.1", "fd00::1"]);
        let on_one_host = node("h1", "192.0.2.1", &["192.0.2.1"]);
        assert_eq!(named(&[on_one_host, beside.clone()]), ["192.0.2.1/32"]);
        // A fence of what others have too would cover them.
        let unknown = node("h1", "127.0.0.1:7402", &[]);
        assert!(named(&[unknown, beside]).is_empty());
    }
}
