//! Statements of newcomers and peers about themselves, before they are verified.

use quoin_identity::{ClusterId, JoinToken, PairToken, Role, TrustedPeers, check_name, peer_of};

pub fn run(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    if let Ok(token) = text.parse::<JoinToken>() {
        let again = token.to_string().parse::<JoinToken>();
        assert!(again.is_ok(), "a token that cannot be read again");
        let _ = token.secret_hash();
    }
    if let Ok(token) = text.parse::<PairToken>() {
        let again = token.to_string().parse::<PairToken>();
        assert!(again.is_ok_and(|again| again == token), "a pair token that cannot be read again");
        let _ = token.secret_hash();
    }
    let _ = TrustedPeers::new().set(ClusterId(1), &text, &[]);
    let _ = text.parse::<ClusterId>();
    let _ = text.parse::<Role>();
    let _ = check_name("node", &text);
    let _ = peer_of(&input.to_vec().into());
}

pub fn seeds() -> Vec<Vec<u8>> {
    let cluster = "0123456789abcdef0123456789abcdef".parse::<ClusterId>();
    let mut seeds = vec![b"node".to_vec(), b"quoin://x/pool/a".to_vec()];
    if let Ok(cluster) = cluster {
        seeds.push(JoinToken::generate(cluster, [7; 32]).to_string().into_bytes());
        let pair = PairToken::generate(cluster, [7; 32], vec!["m:1".into(), "[::1]:2".into()]);
        seeds.extend(pair.map(|token| token.to_string().into_bytes()));
    }
    seeds
}
