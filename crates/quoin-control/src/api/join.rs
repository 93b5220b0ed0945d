//! The Join service.

use quoin_api::control::join_server::Join;
use quoin_api::control::{Certificate, JoinRequest, PairRequest, PeerIntroduction, RenewRequest};
use quoin_identity::Issued;
use tonic::{Request, Response, Status, async_trait};

use super::Services;

fn message(issued: Issued) -> Response<Certificate> {
    Response::new(Certificate {
        chain_pem: issued.chain_pem.into_bytes(),
        authorities_pem: issued.authorities_pem.into_bytes(),
        cluster_id: issued.cluster.to_string(),
    })
}

#[async_trait]
impl Join for Services {
    async fn join(&self, request: Request<JoinRequest>) -> Result<Response<Certificate>, Status> {
        self.newcomer(&request)?;
        let JoinRequest { token, csr_der, role, name } = request.into_inner();
        Ok(message(self.controller.membership.members.join(&token, &csr_der, &role, &name).await?))
    }

    async fn renew(&self, request: Request<RenewRequest>) -> Result<Response<Certificate>, Status> {
        let member = self.member(&request)?;
        Ok(message(
            self.controller
                .membership
                .members
                .renew(&member, &request.into_inner().csr_der)
                .await?,
        ))
    }

    async fn pair(
        &self,
        request: Request<PairRequest>,
    ) -> Result<Response<PeerIntroduction>, Status> {
        self.newcomer(&request)?;
        let PairRequest { token, introduction } = request.into_inner();
        Ok(Response::new(self.controller.membership.peers.answer(&token, introduction).await?))
    }
}
