//! A real controller on real sockets.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use quoin_api::control::CreateJoinTokenRequest;
use quoin_api::control::agent_client::AgentClient;
use quoin_api::control::cluster_client::ClusterClient;
use quoin_control::{Controller, Options};
use quoin_identity::{Identity, JoinToken, Lifetimes, Role, join, unix_channel};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;
use tonic::transport::Channel;

pub struct Server {
    pub dir: tempfile::TempDir,
    pub address: String,
    pub controller: Arc<Controller>,
    pub first_token: JoinToken,
    admin: PathBuf,
    down: watch::Sender<bool>,
    serving: tokio::task::JoinHandle<Result<(), quoin_control::Error>>,
}

impl Server {
    pub async fn start() -> Self {
        Self::with(Lifetimes::default()).await
    }

    pub async fn with(lifetimes: Lifetimes) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().join("controller");
        let made = quoin_control::init(&home, lifetimes).await.unwrap();
        Self::over(dir, lifetimes, made.join_token).await
    }

    /// Serves the cluster in the directory `controller` of `dir`.
    pub async fn over(
        dir: tempfile::TempDir,
        lifetimes: Lifetimes,
        first_token: JoinToken,
    ) -> Self {
        let home = dir.path().join("controller");
        let options = Options { lifetimes, ..Options::new(&home) };
        let controller = Arc::new(quoin_control::open(&options).await.unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let admin = home.join("admin.sock");
        let _ = std::fs::remove_file(&admin);
        let local = UnixListener::bind(&admin).unwrap();
        let (down, shutdown) = watch::channel(false);
        let served = controller.clone();
        let serving = tokio::spawn(async move {
            quoin_control::serve(served, local, Some(listener), shutdown).await
        });
        Self { dir, address, controller, first_token, admin, down, serving }
    }

    pub async fn stop(self) {
        self.down.send_replace(true);
        tokio::time::timeout(Duration::from_secs(10), self.serving)
            .await
            .expect("a shutdown waits for nobody")
            .unwrap()
            .unwrap();
    }

    /// Returns how it ended by itself, and its directory.
    pub async fn ended(self) -> (quoin_control::Error, tempfile::TempDir) {
        let ended = tokio::time::timeout(Duration::from_secs(30), self.serving).await;
        (ended.expect("it goes on").unwrap().expect_err("an end with a reason"), self.dir)
    }

    pub fn admin(&self) -> ClusterClient<Channel> {
        ClusterClient::new(unix_channel(&self.admin))
    }

    pub fn local_agent(&self) -> AgentClient<Channel> {
        AgentClient::new(unix_channel(&self.admin))
    }

    pub async fn token(&self, role: &str, name: &str, ttl_s: u32) -> JoinToken {
        let asked = CreateJoinTokenRequest {
            role: role.into(),
            ttl_s,
            name: name.into(),
            manages_volumes: false,
        };
        let token = self.admin().create_join_token(asked).await.unwrap().into_inner();
        token.token.parse().unwrap()
    }

    pub fn home(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns a node whose token lets it manage volumes.
    pub async fn manager(&self, name: &str) -> Identity {
        let asked = CreateJoinTokenRequest {
            role: "node".into(),
            manages_volumes: true,
            ..Default::default()
        };
        let token = self.admin().create_join_token(asked).await.unwrap().into_inner();
        let token = token.token.parse().unwrap();
        join(&self.address, &token, Role::Node, name, &self.home(name)).await.unwrap()
    }

    pub async fn member(&self, role: Role, name: &str) -> Identity {
        let token = self.token(role.as_str(), "", 60).await;
        join(&self.address, &token, role, name, &self.home(&format!("{role}-{name}")))
            .await
            .unwrap()
    }
}
