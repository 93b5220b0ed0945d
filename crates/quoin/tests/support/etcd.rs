//! An etcd cluster of real processes.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::common::{eventually, free_port, run, signal};

/// Three members of an etcd cluster on this host.
pub struct Etcd {
    members: Vec<Option<Child>>,
    arguments: Vec<Vec<String>>,
    /// Ports of their health.
    health: Vec<u16>,
    pub endpoints: String,
    directory: PathBuf,
}

impl Etcd {
    pub fn start(directory: &Path) -> Self {
        Self::start_with(directory, "http", &[])
    }

    /// With further options, for clients that come by `scheme`.
    pub fn start_with(directory: &Path, scheme: &str, options: &[String]) -> Self {
        std::fs::create_dir_all(directory).unwrap();
        let ports: Vec<[u16; 3]> = (0..3).map(|_| [(); 3].map(|()| free_port())).collect();
        let plain = |port: u16| format!("http://127.0.0.1:{port}");
        let url = |port: u16| format!("{scheme}://127.0.0.1:{port}");
        let peers: Vec<_> =
            ports.iter().zip(0..).map(|(p, n)| format!("e{n}={}", plain(p[1]))).collect();
        let arguments = ports.iter().zip(0..).map(|([client, peer, health], n)| {
            let pairs = [
                ("name", format!("e{n}")),
                ("data-dir", directory.join(format!("e{n}")).to_str().unwrap().to_owned()),
                ("listen-client-urls", url(*client)),
                ("advertise-client-urls", url(*client)),
                ("listen-peer-urls", plain(*peer)),
                ("initial-advertise-peer-urls", plain(*peer)),
                ("listen-metrics-urls", plain(*health)),
                ("initial-cluster", peers.join(",")),
                ("initial-cluster-state", "new".to_owned()),
            ];
            let pairs = pairs.into_iter();
            let all = pairs.flat_map(|(name, value)| [format!("--{name}"), value]);
            all.chain(options.iter().cloned()).collect()
        });
        let arguments: Vec<Vec<String>> = arguments.collect();
        let endpoints: Vec<_> = ports.iter().map(|port| url(port[0])).collect();
        let mut etcd = Self {
            members: vec![None, None, None],
            arguments,
            health: ports.iter().map(|ports| ports[2]).collect(),
            endpoints: endpoints.join(","),
            directory: directory.to_owned(),
        };
        etcd.run_all();
        etcd
    }

    fn run_all(&mut self) {
        (0..3).for_each(|member| self.run(member));
        self.wait_until_healthy();
    }

    pub fn wait_until_healthy(&self) {
        for port in &self.health {
            eventually("each member of etcd knows a majority", || is_healthy(*port).then_some(()));
        }
    }

    pub fn run(&mut self, member: usize) {
        let log = self.directory.join(format!("e{member}.log"));
        let log = std::fs::File::options().create(true).append(true).open(log).unwrap();
        let started = Command::new("etcd")
            .args(&self.arguments[member])
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("etcd, of the package etcd-server");
        self.members[member] = Some(started);
    }

    pub fn kill(&mut self, member: usize) {
        let mut child = self.members[member].take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    pub fn signal(&self, member: usize, name: &str) {
        signal(self.members[member].as_ref().unwrap().id(), name);
    }

    /// Copies what all members have, as of now.
    pub fn copy(&mut self) {
        (0..3).for_each(|member| self.kill(member));
        for member in 0..3 {
            let data = self.directory.join(format!("e{member}"));
            let old = self.directory.join(format!("old{member}"));
            run("cp", &["-a", data.to_str().unwrap(), old.to_str().unwrap()]);
        }
        self.run_all();
    }

    /// Puts the copy back.
    pub fn put_back(&mut self) {
        (0..3).for_each(|member| self.kill(member));
        for member in 0..3 {
            let data = self.directory.join(format!("e{member}"));
            std::fs::remove_dir_all(&data).unwrap();
            std::fs::rename(self.directory.join(format!("old{member}")), &data).unwrap();
        }
        self.run_all();
    }

    pub fn flags(&self) -> Vec<&str> {
        vec!["--store", "etcd", "--etcd-endpoints", &self.endpoints]
    }
}

fn is_healthy(port: u16) -> bool {
    let ask = || {
        let mut stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.write_all(b"GET /health HTTP/1.0\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok::<_, std::io::Error>(answer)
    };
    ask().is_ok_and(|answer| answer.contains("\"health\":\"true\""))
}

impl Drop for Etcd {
    fn drop(&mut self) {
        for child in self.members.iter_mut().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
