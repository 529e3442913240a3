// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package lab

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/cilium/networkdriver/test/lab/internal/guest"
)

func TestKubeModule(t *testing.T) {
	got := kubeModule("1.34.4", []byte(`module k8s.io/kubernetes

replace (
	k8s.io/api => ./staging/src/k8s.io/api
	k8s.io/kube-openapi => example.test/other v1.0.0
	k8s.io/client-go => ./staging/src/k8s.io/client-go
)
`))
	require.Contains(t, got, "require k8s.io/kubernetes v1.34.4\n")
	require.Contains(t, got, "\tk8s.io/api => k8s.io/api v0.34.4\n")
	require.Contains(t, got, "\tk8s.io/client-go => k8s.io/client-go v0.34.4\n")
	require.NotContains(t, got, "kube-openapi")
}

// The pinned module and the constant name the same version.
func TestPinnedKubernetes(t *testing.T) {
	data, err := os.ReadFile(filepath.Join("components", "kube", "go.mod"))
	require.NoError(t, err)
	require.Contains(t, string(data), "k8s.io/kubernetes v"+DefaultKubernetes+"\n")
	require.Contains(t, string(data), "k8s.io/api => k8s.io/api v0."+strings.TrimPrefix(DefaultKubernetes, "1.")+"\n")
}

func TestBuiltOfAnEmptyCache(t *testing.T) {
	_, err := Built(BuildOptions{Cache: t.TempDir()})
	require.ErrorIs(t, err, ErrNotBuilt)
}

func TestOpenWithoutLab(t *testing.T) {
	_, err := Open(Options{State: t.TempDir()})
	require.ErrorIs(t, err, ErrNotUp)
}

func TestReadFrames(t *testing.T) {
	three := 3
	var answer bytes.Buffer
	encoder := json.NewEncoder(&answer)
	for _, f := range []guest.Frame{{Stdout: []byte("a\n")}, {Stderr: []byte("e")}, {Stdout: []byte("b")}, {Exit: &three}} {
		require.NoError(t, encoder.Encode(f))
	}
	whole := answer.Bytes()
	var stdout, stderr bytes.Buffer
	code, err := readFrames(bytes.NewReader(whole), &stdout, &stderr)
	require.NoError(t, err)
	require.Equal(t, 3, code)
	require.Equal(t, "a\nb", stdout.String())
	require.Equal(t, "e", stderr.String())

	// A script whose end was not seen has not succeeded.
	for _, cut := range []int{0, 5, bytes.LastIndexByte(whole[:len(whole)-1], '\n') + 1} {
		_, err = readFrames(bytes.NewReader(whole[:cut]), &stdout, &stderr)
		require.ErrorContains(t, err, "broke off", "after %d bytes", cut)
	}
	_, err = readFrames(strings.NewReader(`{"Error":"no shell"}`), &stdout, &stderr)
	require.EqualError(t, err, "no shell")
}

// auxdata returns the kernel's message about a frame's tag.
func auxdata(status uint32, tci uint16) []byte {
	const size = 20
	oob := make([]byte, unix.CmsgSpace(size))
	binary.NativeEndian.PutUint64(oob, uint64(unix.CmsgLen(size)))
	binary.NativeEndian.PutUint32(oob[8:], unix.SOL_PACKET)
	binary.NativeEndian.PutUint32(oob[12:], unix.PACKET_AUXDATA)
	binary.NativeEndian.PutUint32(oob[16:], status)
	binary.NativeEndian.PutUint16(oob[32:], tci)
	return oob
}

func TestParseFrame(t *testing.T) {
	addresses := []byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}
	plain := append(append([]byte{}, addresses...), 0x08, 0x00, 0x45)
	f, ok := parseFrame(plain, nil)
	require.True(t, ok)
	require.False(t, f.Tagged)
	require.Equal(t, uint16(unix.ETH_P_IP), f.EtherType)
	require.Equal(t, []byte{0x45}, f.Payload)
	require.Equal(t, "01:02:03:04:05:06", f.Dst.String())
	require.Equal(t, "07:08:09:0a:0b:0c", f.Src.String())

	// The kernel may tell of the tag apart from the frame, or leave it in.
	f, ok = parseFrame(plain, auxdata(unix.TP_STATUS_VLAN_VALID, 3<<13|1001))
	require.True(t, ok)
	require.True(t, f.Tagged)
	require.Equal(t, 1001, f.VLAN)
	f, ok = parseFrame(plain, auxdata(0, 1001))
	require.True(t, ok)
	require.False(t, f.Tagged)
	f, ok = parseFrame(append(append([]byte{}, addresses...), 0x81, 0x00, 0x63, 0xe9, 0x08, 0x06, 0x01), nil)
	require.True(t, ok)
	require.Equal(t, 1001, f.VLAN)
	require.Equal(t, uint16(unix.ETH_P_ARP), f.EtherType)
	require.Equal(t, []byte{0x01}, f.Payload)

	_, ok = parseFrame(plain[:13], nil)
	require.False(t, ok)
}

func TestCaptureWaitFor(t *testing.T) {
	c := &Capture{more: make(chan struct{})}
	c.add(Frame{VLAN: 1})
	go c.add(Frame{VLAN: 2})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	f, err := c.WaitFor(ctx, func(f Frame) bool { return f.VLAN == 2 })
	require.NoError(t, err)
	require.Equal(t, 2, f.VLAN)
	require.Len(t, c.Frames(), 2)
	cancel()
	_, err = c.WaitFor(ctx, func(f Frame) bool { return f.VLAN == 3 })
	require.ErrorIs(t, err, context.Canceled)
}

func TestQuote(t *testing.T) {
	for _, word := range []string{"plain", "with space", `it's "so" $HOME`, ""} {
		out, err := exec.Command("/bin/sh", "-c", "printf %s "+quote(word)).Output()
		require.NoError(t, err)
		require.Equal(t, word, string(out))
	}
}

func TestLogs(t *testing.T) {
	state := t.TempDir()
	for _, path := range []string{"control-plane/log/etcd.log", "nodes/node1/console.log", "nodes/node1/guest/log/kubelet.log"} {
		path = filepath.Join(state, path)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, nil, 0o644))
	}
	logs, err := Logs(Options{State: state})
	require.NoError(t, err)
	require.Equal(t, map[string]string{
		"etcd":          filepath.Join(state, "control-plane/log/etcd.log"),
		"node1/console": filepath.Join(state, "nodes/node1/console.log"),
		"node1/kubelet": filepath.Join(state, "nodes/node1/guest/log/kubelet.log"),
	}, logs)
}
