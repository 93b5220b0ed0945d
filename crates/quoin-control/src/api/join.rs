//! The Join service.

use quoin_api::control::join_server::Join;
use quoin_api::control::{
    Certificate, IntroduceRequest, JoinRequest, JoinToken, PairRequest, PeerIntroduction,
    RenewRequest,
};
use quoin_identity::Issued;
use tonic::{Request, Response, Status, async_trait};

use super::Services;
use crate::Error;

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

    async fn introduce(
        &self,
        request: Request<IntroduceRequest>,
    ) -> Result<Response<JoinToken>, Status> {
        self.newcomer(&request)?;
        let IntroduceRequest { service_account_token, role, name } = request.into_inner();
        let Some(kubernetes) = self.controller.membership.kubernetes.get() else {
            return Err(Error::Precondition(
                "this controller admits no pods by their service accounts: start it with \
                 --admit-service-accounts, or give the member a join token"
                    .to_owned(),
            )
            .into());
        };
        let (state, members) = (&self.controller.state, &self.controller.membership.members);
        let (token, expires_ms) =
            kubernetes.introduce((state, members), &service_account_token, &role, &name).await?;
        let expires_at = Some(crate::time::timestamp(expires_ms));
        Ok(Response::new(JoinToken { token: token.to_string(), expires_at }))
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
