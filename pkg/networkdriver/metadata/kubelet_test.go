// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package metadata

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
)

// kubelet calls the driver by kubeletplugin's server.
type kubelet struct {
	t       *testing.T
	client  drapb.DRAPluginClient
	objects *fake.Clientset
	answers map[string]*drapb.NodePrepareResourceResponse
}

func newKubelet(t *testing.T, f *fixture) *kubelet {
	// Not t.TempDir: a socket's path must be short.
	dir, err := os.MkdirTemp("", "md")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	f.PluginDir = dir
	k := &kubelet{t: t, objects: fake.NewClientset(), answers: map[string]*drapb.NodePrepareResourceResponse{}}
	helper, err := kubeletplugin.Start(t.Context(), plugin{f: f}, append(f.Options(),
		kubeletplugin.DriverName(testDriver), kubeletplugin.NodeName(testNode), kubeletplugin.KubeClient(k.objects),
		kubeletplugin.PluginDataDirectoryPath(dir), kubeletplugin.RegistrationService(false), kubeletplugin.HealthService(false))...)
	require.NoError(t, err)
	conn, err := grpc.NewClient("unix://"+filepath.Join(dir, "dra.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(); helper.Stop() })
	k.client = drapb.NewDRAPluginClient(conn)
	return k
}

func (k *kubelet) claim(name, uid string) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: objectMeta(name, uid),
		Status:     resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{}},
	}
}

func (k *kubelet) prepare(claim *resourceapi.ResourceClaim) {
	k.t.Helper()
	_ = k.objects.ResourceV1().ResourceClaims(claim.Namespace).Delete(context.Background(), claim.Name, metav1.DeleteOptions{})
	_, err := k.objects.ResourceV1().ResourceClaims(claim.Namespace).Create(context.Background(), claim, metav1.CreateOptions{})
	require.NoError(k.t, err)
	answer, err := k.client.NodePrepareResources(k.t.Context(), &drapb.NodePrepareResourcesRequest{
		Claims: []*drapb.Claim{{Namespace: claim.Namespace, Name: claim.Name, Uid: string(claim.UID)}},
	})
	require.NoError(k.t, err)
	k.answers[string(claim.UID)] = answer.Claims[string(claim.UID)]
	require.Empty(k.t, answer.Claims[string(claim.UID)].Error)
}

func (k *kubelet) mustPrepare(claim *resourceapi.ResourceClaim) {
	k.t.Helper()
	k.prepare(claim)
	require.NotEmpty(k.t, k.ids(string(claim.UID)))
}

// ids are the CDI devices that it was given.
func (k *kubelet) ids(uid string) (ids []string) {
	for _, d := range k.answers[uid].Devices {
		ids = append(ids, d.CdiDeviceIds...)
	}
	return ids
}

func (k *kubelet) unprepare(name, uid string) {
	k.t.Helper()
	answer, err := k.client.NodeUnprepareResources(k.t.Context(), &drapb.NodeUnprepareResourcesRequest{
		Claims: []*drapb.Claim{{Namespace: "default", Name: name, Uid: uid}},
	})
	require.NoError(k.t, err)
	require.Empty(k.t, answer.Claims[uid].Error)
}
