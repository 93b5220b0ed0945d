//! STARTTLS with client certificates, inside the session.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use quoin_nbd::TlsPolicy;
use quoin_nbd::protocol::{
    OPTION_MAGIC, OPTION_REPLY_MAGIC, RequestHeader, SIMPLE_REPLY_MAGIC, be32, be64, command,
    option, reply,
};
use quoin_testkit::nbd_server::{ServerOptions, Volume, serve, volume};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, StreamOwned};

/// A certificate authority.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: CertificateDer<'static>,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap().der().clone();
        Self { issuer: Issuer::new(params, key), certificate }
    }

    fn leaf(&self, name: &str) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap().der().clone();
        (vec![certificate], PrivatePkcs8KeyDer::from(key.serialize_der()).into())
    }

    fn roots(&self) -> Arc<RootCertStore> {
        let mut roots = RootCertStore::empty();
        roots.add(self.certificate.clone()).unwrap();
        Arc::new(roots)
    }

    fn server(&self) -> Arc<ServerConfig> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let verifier = rustls::server::WebPkiClientVerifier::builder_with_provider(
            self.roots(),
            provider.clone(),
        )
        .build()
        .unwrap();
        let (chain, key) = self.leaf("target");
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)
            .unwrap();
        Arc::new(config)
    }

    /// A client that trusts this authority, with a certificate from `of`.
    fn client(&self, of: Option<&Authority>) -> Arc<ClientConfig> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(self.roots());
        Arc::new(match of {
            Some(of) => {
                let (chain, key) = of.leaf("client");
                builder.with_client_auth_cert(chain, key).unwrap()
            }
            None => builder.with_no_client_auth(),
        })
    }
}

/// Serves one connection and returns the client's end of it.
fn connection(authority: &Authority, volume: &Volume) -> TcpStream {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (volume, policy) = (volume.clone(), TlsPolicy::Required(authority.server()));
    std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let options = ServerOptions { policy, ..Default::default() };
        serve(stream, &volume, &options, &AtomicU64::new(0));
    });
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    stream.write_all(&3u32.to_be_bytes()).unwrap();
    stream
}

fn request_option(
    stream: &mut (impl Read + Write),
    code: u32,
    data: &[u8],
) -> std::io::Result<u32> {
    let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend(code.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    stream.write_all(&bytes)?;
    loop {
        let mut header = [0; 20];
        stream.read_exact(&mut header)?;
        assert_eq!((be64(&header, 0), be32(&header, 8)), (OPTION_REPLY_MAGIC, code));
        let mut body = vec![0; be32(&header, 16) as usize];
        stream.read_exact(&mut body)?;
        if be32(&header, 12) != reply::INFO {
            return Ok(be32(&header, 12));
        }
    }
}

type Secure = StreamOwned<ClientConnection, TcpStream>;

fn secure(stream: TcpStream, config: Arc<ClientConfig>) -> Secure {
    let name = ServerName::try_from("target").unwrap();
    StreamOwned::new(ClientConnection::new(config, name).unwrap(), stream)
}

#[test]
fn a_client_with_a_good_certificate_writes_and_reads_through_tls() {
    let authority = Authority::new();
    let memory = volume(16 << 20);
    let mut clear = connection(&authority, &memory);
    assert_eq!(request_option(&mut clear, option::STARTTLS, &[]).unwrap(), reply::ACK);
    let mut stream = secure(clear, authority.client(Some(&authority)));
    assert_eq!(request_option(&mut stream, option::STARTTLS, &[]).unwrap(), reply::ERR_INVALID);
    assert_eq!(request_option(&mut stream, option::GO, b"\0\0\0\x03vol\0\0").unwrap(), reply::ACK);
    // Longer than any buffer of TLS: the write is assembled from many records.
    let length = 9 << 20;
    let data: Vec<u8> = (0..length).map(|at| (at % 253) as u8).collect();
    let header = RequestHeader {
        flags: 0,
        command: command::WRITE,
        cookie: 5,
        offset: 4096,
        length: length as u32,
    };
    stream.write_all(&header.encode()).unwrap();
    stream.write_all(&data).unwrap();
    let mut answer = [0; 16];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!((be32(&answer, 0), be32(&answer, 4)), (SIMPLE_REPLY_MAGIC, 0));
    stream.write_all(&RequestHeader { command: command::READ, ..header }.encode()).unwrap();
    stream.read_exact(&mut answer).unwrap();
    assert_eq!((be32(&answer, 0), be32(&answer, 4)), (SIMPLE_REPLY_MAGIC, 0));
    let mut back = vec![0; length];
    stream.read_exact(&mut back).unwrap();
    assert!(back == data && memory.lock().unwrap().bytes()[4096..4096 + length] == data);
    let goodbye = RequestHeader { command: command::DISCONNECT, length: 0, ..header };
    stream.write_all(&goodbye.encode()).unwrap();
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0, "TLS ended with close_notify");
}

#[test]
fn no_export_is_reported_before_tls() {
    let authority = Authority::new();
    let mut clear = connection(&authority, &volume(1 << 20));
    for code in [option::LIST, option::GO, option::INFO, option::STRUCTURED_REPLY] {
        assert_eq!(request_option(&mut clear, code, &[]).unwrap(), reply::ERR_TLS_REQD);
    }
    let closed = request_option(&mut clear, option::EXPORT_NAME, b"vol").unwrap_err();
    assert_eq!(closed.kind(), std::io::ErrorKind::UnexpectedEof);
}

#[test]
fn a_proof_of_a_key_is_taken_through_tls_alone_and_its_answer_tells_nothing() {
    let authority = Authority::new();
    let mut clear = connection(&authority, &volume(1 << 20));
    let proof = [7; 32];
    assert_eq!(request_option(&mut clear, option::PROVE_KEY, &proof).unwrap(), reply::ERR_TLS_REQD);
    assert_eq!(request_option(&mut clear, option::STARTTLS, &[]).unwrap(), reply::ACK);
    let mut stream = secure(clear, authority.client(Some(&authority)));
    for wrong in [&[][..], &[7; 31], &[7; 33]] {
        let answer = request_option(&mut stream, option::PROVE_KEY, wrong).unwrap();
        assert_eq!(answer, reply::ERR_INVALID);
    }
    for _ in 0..2 {
        assert_eq!(request_option(&mut stream, option::PROVE_KEY, &proof).unwrap(), reply::ACK);
    }
}

#[test]
fn a_client_without_a_certificate_of_this_cluster_is_refused() {
    let (authority, foreign) = (Authority::new(), Authority::new());
    for certificate in [None, Some(&foreign)] {
        let mut clear = connection(&authority, &volume(1 << 20));
        assert_eq!(request_option(&mut clear, option::STARTTLS, &[]).unwrap(), reply::ACK);
        let mut stream = secure(clear, authority.client(certificate));
        assert!(request_option(&mut stream, option::GO, b"\0\0\0\x03vol\0\0").is_err());
    }
}

#[test]
fn clear_bytes_after_starttls_end_the_session() {
    let authority = Authority::new();
    let mut clear = connection(&authority, &volume(1 << 20));
    assert_eq!(request_option(&mut clear, option::STARTTLS, &[]).unwrap(), reply::ACK);
    assert!(request_option(&mut clear, option::LIST, &[]).is_err());
}
