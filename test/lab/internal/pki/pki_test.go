// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package pki

import (
	"crypto/tls"
	"crypto/x509"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/client-go/tools/clientcmd"
)

func TestCertificates(t *testing.T) {
	dir := t.TempDir()
	ca, err := New(dir)
	require.NoError(t, err)
	require.NoError(t, ca.WriteServing(dir, "apiserver", "localhost", "10.88.0.1"))

	pool := x509.NewCertPool()
	caPEM, err := os.ReadFile(filepath.Join(dir, "ca.crt"))
	require.NoError(t, err)
	require.True(t, pool.AppendCertsFromPEM(caPEM))

	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, "apiserver.crt"), filepath.Join(dir, "apiserver.key"))
	require.NoError(t, err)
	for _, host := range []string{"localhost", "10.88.0.1"} {
		_, err = pair.Leaf.Verify(x509.VerifyOptions{Roots: pool, DNSName: host})
		require.NoError(t, err, host)
	}
	_, err = pair.Leaf.Verify(x509.VerifyOptions{Roots: pool, DNSName: "10.88.0.2"})
	require.Error(t, err)

	// Another program that loads the CA makes users that the first one's cluster trusts.
	loaded, err := Load(dir)
	require.NoError(t, err)
	data, err := loaded.Kubeconfig("https://10.88.0.1:6443", "system:node:node1", "system:nodes")
	require.NoError(t, err)
	cfg, err := clientcmd.RESTConfigFromKubeConfig(data)
	require.NoError(t, err)
	require.Equal(t, "https://10.88.0.1:6443", cfg.Host)
	require.False(t, cfg.Insecure)
	pair, err = tls.X509KeyPair(cfg.CertData, cfg.KeyData)
	require.NoError(t, err)
	require.Equal(t, "system:node:node1", pair.Leaf.Subject.CommonName)
	require.Equal(t, []string{"system:nodes"}, pair.Leaf.Subject.Organization)
	_, err = pair.Leaf.Verify(x509.VerifyOptions{Roots: pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	require.NoError(t, err)
	_, err = pair.Leaf.Verify(x509.VerifyOptions{Roots: pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	require.Error(t, err, "a user is no server")
}

func TestLoadWhatIsNoCA(t *testing.T) {
	_, err := Load(t.TempDir())
	require.ErrorIs(t, err, os.ErrNotExist)
}
