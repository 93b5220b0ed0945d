//! Hosts: a network namespace for each, all plugged into a bridge that has one of its own.
//!
//! A host's link is cut on the switch's side, so that the host itself observes only silence. Where
//! namespaces cannot be made (no root, no `ip`), all processes share loopback and links have no
//! faults; the summary reports it.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

pub struct Network {
    prefix: String,
    hosts: Vec<String>,
    /// True if the kernel can delay packets.
    pub delays: bool,
}

impl Network {
    /// `None`: this machine cannot make namespaces.
    pub fn make(hosts: &[&str]) -> Result<Option<Self>> {
        let on_path = Command::new("ip").arg("-V").stdout(Stdio::null()).status().is_ok();
        if !rustix::process::geteuid().is_root() || !on_path {
            return Ok(None);
        }
        // Names of links have at most 15 characters.
        let prefix = format!("qt{:x}", std::process::id() & 0xff_ffff);
        let mut network = Self { prefix, hosts: Vec::new(), delays: false };
        network.ip(&["netns", "add", &network.switch()]).context("make a network namespace")?;
        network.on_switch(&["link", "add", "br0", "type", "bridge"])?;
        network.on_switch(&["link", "set", "br0", "up"])?;
        for host in hosts {
            network.add(host)?;
        }
        network.delays = network.delay(hosts[0], 0).is_ok();
        Ok(Some(network))
    }

    fn switch(&self) -> String {
        format!("{}-switch", self.prefix)
    }

    /// Returns the namespace of a host.
    pub fn namespace(&self, host: &str) -> String {
        format!("{}-{host}", self.prefix)
    }

    /// Returns the address of a host.
    pub fn address(&self, host: &str) -> String {
        let index = self.hosts.iter().position(|h| h == host).unwrap_or(0);
        format!("10.77.7.{}", index + 1)
    }

    fn add(&mut self, host: &str) -> Result<()> {
        self.hosts.push(host.to_owned());
        let (name, address) = (self.namespace(host), self.address(host));
        let (inside, outside) = ("eth0", host);
        self.ip(&["netns", "add", &name])?;
        self.on_switch(&[
            "link", "add", outside, "type", "veth", "peer", "name", inside, "netns", &name,
        ])?;
        self.on_switch(&["link", "set", outside, "master", "br0"])?;
        self.on_switch(&["link", "set", outside, "up"])?;
        self.ip(&["-n", &name, "link", "set", "lo", "up"])?;
        self.ip(&["-n", &name, "addr", "add", &format!("{address}/24"), "dev", inside])?;
        self.ip(&["-n", &name, "link", "set", inside, "up"])?;
        Ok(())
    }

    /// Drops all packets from and to this host.
    pub fn cut(&self, host: &str) -> Result<()> {
        self.on_switch(&["link", "set", host, "down"])
    }

    pub fn heal(&self, host: &str) -> Result<()> {
        self.on_switch(&["link", "set", host, "up"])
    }

    /// Delays each packet to this host by this time; 0: none.
    pub fn delay(&self, host: &str, delay_ms: u32) -> Result<()> {
        let (switch, time) = (self.switch(), format!("{delay_ms}ms"));
        let mut command = Command::new("tc");
        command.args(["-n", &switch, "qdisc", "replace", "dev", host, "root", "netem", "delay"]);
        run(command.arg(time))
    }

    fn on_switch(&self, arguments: &[&str]) -> Result<()> {
        let switch = self.switch();
        self.ip(&[&["-n", switch.as_str()], arguments].concat())
    }

    fn ip(&self, arguments: &[&str]) -> Result<()> {
        run(Command::new("ip").args(arguments))
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for host in self.hosts.iter().map(String::as_str).chain(["switch"]) {
            let name = format!("{}-{host}", self.prefix);
            if let Err(error) = self.ip(&["netns", "del", &name]) {
                eprintln!("could not remove network namespace {name}: {error:#}");
            }
        }
    }
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("{command:?}"))?;
    if !output.status.success() {
        bail!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}
